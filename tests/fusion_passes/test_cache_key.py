"""Inductor's caches: nothing changed in a new process is a hit, one threshold changed is a miss."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from custom_ops import flashinfer_adapter, limits
from fusion_passes import AllReduceRMSFusionPass, FusionConfig, allreduce_rms_fusion, compat
from tests.support import profiles
from tests.support.cached_program import both

PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
import fusion_passes
from custom_ops import flashinfer_adapter
from tests.support.programs import HIDDEN, NORMS, AddNorm, tensors

if release := os.environ.get("PRETENDED_FLASHINFER"):
    flashinfer_adapter.version = lambda: release
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
options = fusion_passes.options(fusion_passes.FusionConfig(**json.loads(sys.argv[1])))
with torch.no_grad():
    compiled = torch.compile(AddNorm(NORMS["meta"]()), fullgraph=True, options=options)
    norm, total = compiled(*tensors(2, 8, HIDDEN))
expected = torch.nn.functional.rms_norm(total, (HIDDEN,), NORMS["meta"]().weight, 1e-5)
names = ("fxgraph_cache_hit", "fxgraph_cache_miss")
print(json.dumps({
    "counts": [counters["inductor"][name] for name in names],
    "autograd_hit": counters["aot_autograd"]["autograd_cache_hit"],
    "right": bool((norm - expected).abs().max() < 0.05),
}))
"""

SHIPPED = str(Path(limits.__file__).parent / "profiles" / "nvidia_h200_2.json")
HIT, MISS = [1, 0], [0, 1]


def run(cache: Path, environment: dict[str, str] | None = None, **config: Any) -> dict[str, Any]:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(config)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(root), **(environment or {})},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["right"]
    return result


def test_new_processes_share_the_cache(tmp_path: Path) -> None:
    assert run(tmp_path)["counts"] == MISS
    again = run(tmp_path)
    assert again["counts"] == HIT
    assert again["autograd_hit"] == 1
    assert run(tmp_path, pdl_advance_launch_tokens=8)["counts"] == MISS
    assert run(tmp_path, {"FUSION_PASSES_FUSE_ALLREDUCE_RMS": "0"})["counts"] == MISS
    assert run(tmp_path, {"PRETENDED_FLASHINFER": "9.9.9"})["counts"] == MISS
    profile = tmp_path / "profile.json"
    for date, outcome in (("2026-12-01", MISS), ("2026-12-01", HIT), ("2026-12-02", MISS)):
        profile.write_text(profiles.profile(date=date).to_json())
        assert run(tmp_path, tuning_profile=str(profile))["counts"] == outcome
    assert run(tmp_path)["counts"] == HIT


def uuid(**config: Any) -> str:
    return AllReduceRMSFusionPass(FusionConfig(**config)).uuid()


def test_identifier_is_stable_and_has_no_rank_or_pointer() -> None:
    assert uuid() == uuid()


@pytest.mark.parametrize(
    "change",
    [
        {"fuse_allreduce_rms": False}, {"launch_with_pdl": False}, {"fp32_acc": False}, {"max_token_num": 1},
        {"pdl_advance_launch_tokens": 15}, {"exact_rounding": True},
        {"reassociate": False}, {"strict": True}, {"fuse_quantisation": False}, {"norm_path": "auto"},
        {"tuning_profile": SHIPPED}, {"backend": "mnnvl"}, {"check_ranks": True},
    ],
    ids=str,
)  # fmt: skip
def test_identifier_changes_with_every_option(change: dict[str, Any]) -> None:
    assert set(change) <= set(FusionConfig.__dataclass_fields__)
    assert uuid(**change) != uuid()


def test_every_option_is_covered_above() -> None:
    (mark,) = [m for m in test_identifier_changes_with_every_option.pytestmark if m.name == "parametrize"]  # type: ignore[attr-defined]
    assert {name for change in mark.args[1] for name in change} == set(FusionConfig.__dataclass_fields__)


def test_identifier_changes_with_versions_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {uuid()}
    monkeypatch.setattr(flashinfer_adapter, "version", lambda: "9.9.9")
    seen.add(uuid())
    monkeypatch.setattr(compat, "TORCH_VERSION", "9.9.9")
    seen.add(uuid())
    monkeypatch.setattr(allreduce_rms_fusion, "_source_digest", lambda: "another")
    seen.add(uuid())
    assert len(seen) == 4


def test_identifier_changes_with_what_the_profile_says(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    seen = set()
    for changes in ({}, {"crossovers": (profiles.ROW._replace(overlap_bytes=1),)}, {"date": "2026-12-01"}):
        path.write_text(profiles.profile(**changes).to_json())
        seen.add(uuid(tuning_profile=str(path)))
    assert len(seen) == 3


def test_profile_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profiles.profile().to_json())
    monkeypatch.setenv("FUSION_PASSES_TUNING_PROFILE", str(path))
    assert uuid() == uuid(tuning_profile=str(path))
    assert uuid(tuning_profile=SHIPPED) != uuid()
    path.write_text("{}")
    with pytest.raises(ValueError, match="'format' must be 1"):
        uuid()


def test_sources_of_both_packages_are_covered() -> None:
    names = {f"{path.parent.name}/{path.name}" for path in allreduce_rms_fusion._sources()}
    assert {
        "custom_ops/limits.py",
        "fusion_passes/norms.py",
        "fusion_passes/rewrite.py",
        "profiles/nvidia_h200_2.json",
    } <= names


def test_one_rank_warm_and_the_other_cold(tmp_path: Path) -> None:
    """Whose cache is cold compiles, whose cache is warm does not; both call the op, and the sum is right."""
    assert [rank["counts"] for rank in both(tmp_path)] == [MISS, MISS]
    assert [rank["counts"] for rank in both(tmp_path)] == [HIT, HIT]
    shutil.rmtree(tmp_path / "1")
    assert [rank["counts"] for rank in both(tmp_path)] == [HIT, MISS]
    shutil.rmtree(tmp_path / "0")
    assert [rank["counts"] for rank in both(tmp_path)] == [MISS, HIT]
