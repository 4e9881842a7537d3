"""The adapter against the installed FlashInfer: versions and signatures, as far as no GPU is needed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from custom_ops import flashinfer_adapter as adapter
from custom_ops.flashinfer_adapter import KernelCall
from custom_ops.formats import FORMATS
from custom_ops.pattern_codes import PATTERNS

flashinfer_comm = pytest.importorskip("flashinfer.comm")


def test_version_is_that_of_the_distribution() -> None:
    assert adapter.version() == importlib.metadata.version("flashinfer-python")


@pytest.mark.parametrize(
    ("version", "mentions"), [(None, "is not installed"), ("0.7.1", "0.7.1 is too old"), ("0.7.2", None), ("1.0", None)]
)
def test_refusal(monkeypatch: pytest.MonkeyPatch, version: str | None, mentions: str | None) -> None:
    monkeypatch.setattr(adapter, "version", lambda: version)
    refusal = adapter.refusal()
    assert refusal is None if mentions is None else mentions in str(refusal)


def test_formats_that_came_later_are_refused_before_their_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "version", lambda: "0.7.2.post1")
    refused = {name: adapter.format_refusal(format) for name, format in FORMATS.items()}
    assert refused.pop("mxfp8") == "flashinfer-python 0.7.2.post1 has no MXFP8 in its kernel; install >= 0.7.4"
    assert set(refused.values()) == {None}
    monkeypatch.setattr(adapter, "version", lambda: "0.7.4")
    assert adapter.format_refusal(FORMATS["mxfp8"]) is None


def test_installed_flashinfer_has_the_patterns_of_every_format_that_is_not_refused() -> None:
    there = set(vars(flashinfer_comm.AllReduceFusionPattern).values())
    for code, pattern in PATTERNS.items():
        assert pattern.format is None or (code in there) is (adapter.format_refusal(FORMATS[pattern.format]) is None)


def test_installed_flashinfer_has_every_parameter() -> None:
    adapter._check_signature()


def test_missing_parameter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_comm, "allreduce_fusion", lambda input, workspace, pattern: None)
    with pytest.raises(RuntimeError, match=r"has no parameter .*trigger_completion_at_end"):
        adapter._check_signature()


def test_launch_passes_what_flashinfer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument binds to FlashInfer's own signature, flags included."""
    signature = inspect.signature(flashinfer_comm.allreduce_fusion)
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        flashinfer_comm, "allreduce_fusion", lambda **kwargs: seen.append(signature.bind(**kwargs).arguments)
    )
    x, residual, norm, total, gamma = (torch.randn(2, 64) for _ in range(5))
    call = KernelCall(
        1, x, one_shot=True, launch_with_pdl=True, completion_at_end=False, fp32_acc=True, residual=residual,
        residual_out=total, norm_out=norm, gamma=gamma[0], eps=1e-5, weight_bias=1.0,
    )  # fmt: skip
    for flags in ({}, {"one_shot": False, "launch_with_pdl": False, "completion_at_end": True, "fp32_acc": False}):
        adapter.launch("workspace", dataclasses.replace(call, **flags))
    first, second = seen
    assert (first["launch_with_pdl"], first["trigger_completion_at_end"]) == (True, False)
    assert (first["use_oneshot"], first["fp32_acc"], first["weight_bias"], first["rms_eps"]) == (True, True, 1.0, 1e-5)
    assert (second["launch_with_pdl"], second["trigger_completion_at_end"]) == (False, True)
    assert (second["use_oneshot"], second["fp32_acc"]) == (False, False)
    assert first["input"] is x
    assert first["residual_in"] is residual
    assert first["output"] is total, "so that FlashInfer allocates nothing"


def test_workspace_is_made_for_exactly_the_group_and_never_with_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    signature = inspect.signature(flashinfer_comm.create_allreduce_fusion_workspace)
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        flashinfer_comm,
        "create_allreduce_fusion_workspace",
        lambda **kwargs: seen.append(signature.bind(**kwargs).arguments),
    )
    group: Any = SimpleNamespace(size=lambda: 4, rank=lambda: 3)
    for dtype in (torch.bfloat16, torch.float32):
        adapter.create(group, dtype, 8 << 20, "trtllm")
        made = seen[-1]
        assert made["backend"] == "trtllm"
        assert (made["group"], made["world_size"], made["rank"], made["dtype"]) == (group, 4, 3, dtype)
        assert made["max_token_num"] * made["hidden_dim"] * dtype.itemsize == 8 << 20
