"""The demo from end to end: a real model with real weights on two ranks, through Inductor's own code generation."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from fusion_passes.cli import demo_model

LAYERS = 30


@pytest.mark.slow
@pytest.mark.skipif(demo_model.missing() is not None, reason=str(demo_model.missing()))
def test_every_site_fuses_and_the_texts_agree() -> None:
    command = [sys.executable, "-m", "fusion_passes", "demo", "--json", "--tokens", "12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert (result["all_reduces"], result["fused"]) == (LAYERS, LAYERS)
    assert [site["rule"] for site in result["sites"]] == ["add_norm"] * LAYERS
    assert [site["module"] for site in result["sites"]] == [f"model.layers.{i}.mlp.down_proj" for i in range(LAYERS)]
    assert result["text_equal"] is True
    assert "alphabet" in result["text"]
    assert result["tokens"] == 12
    # One forward pass a token, one fused call a layer.
    assert sum(result["calls"].values()) == 12 * LAYERS
    # As far from the float32 model as eager mode, which rounds at the same places.
    assert result["error_vs_float32"] < 1.5 * result["error_vs_float32_eager"]
    assert 0 < result["max_abs_logit_diff"] < 4
    assert result["device"] == ("cpu" if torch.cuda.device_count() < 2 else torch.cuda.get_device_name())
