"""Every environment in which nothing fuses: said by doctor, and a no-op with the same reason in the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from custom_ops import domain, flashinfer_adapter, limits, machine
from custom_ops.formats import FORMATS, Quantisation
from fusion_passes import AllReduceRMSFusionPass, FusionConfig, doctor
from fusion_passes.cli.app import app
from fusion_passes.environment import Environment
from tests.support import profiles
from tests.support.capture import capture
from tests.support.programs import HIDDEN, NORMS, AddNorm, tensors

CUDA = torch.device("cuda", 0)


@dataclass
class Machine:
    """A machine that is not there."""

    devices: list[str] = field(default_factory=lambda: ["NVIDIA H200", "NVIDIA H200"])
    capability: tuple[int, int] = (9, 0)
    peers: bool = True
    packages: dict[str, str] = field(default_factory=lambda: {"flashinfer-python": "0.7.4"})
    built: bool = True

    @contextmanager
    def installed(self, compiling: bool = False) -> Iterator[None]:
        """Put it in the place of this one; torch itself does not see it where something is to be compiled."""
        seen = {
            (torch.cuda, "is_available"): lambda: bool(self.devices),
            (torch.cuda, "device_count"): lambda: len(self.devices),
            (torch.cuda, "can_device_access_peer"): lambda a, b: self.peers,
        }
        replaced: dict[tuple[Any, str], Any] = {
            **({} if compiling else seen),
            (machine, "name"): lambda device: self.devices[device.index or 0],
            (machine, "capability"): lambda device: self.capability if self.devices else None,
            (flashinfer_adapter, "_installed"): self.packages.get,
            (flashinfer_adapter, "version"): lambda: self.packages.get("flashinfer-python"),
            (flashinfer_adapter, "is_built"): lambda: self.built,
        }
        with ExitStack() as stack:
            for (module, name), value in replaced.items():
                stack.enter_context(patch.object(module, name, value))
            limits._known.cache_clear()
            yield


def found(there: Machine, status: str | None = None) -> list[str]:
    with there.installed():
        findings = doctor.examine()
    return [f"{finding.name}: {finding.text}" for finding in findings if status in (None, finding.status)]


def test_two_h200_fuse() -> None:
    there = Machine()
    assert found(there, "fail") == []
    said = "\n".join(found(there, "ok"))
    for text in (
        "flashinfer-python 0.7.4", "cuda:1: NVIDIA H200, compute capability 9.0", "peer access between all 2 devices",
        "2 ranks: up to 32 MiB at hidden size 4096 (NVIDIA H200, 2 ranks, 2026-11-30)", "fp8_token fuses",
        "fuses in bfloat16, float16 and float32",
    ):  # fmt: skip
        assert text in said, text
    notes = "\n".join(found(there, "note"))
    assert "nvfp4 does not fuse: compute capability 9.0: NVFP4 in the kernel needs 10.0 or later" in notes
    assert "no process group here" in notes


BAD: dict[str, tuple[Machine, str]] = {
    "no CUDA": (Machine(devices=[]), "devices: no CUDA device; on CPU tensors the ops run their reference"),
    "one GPU": (Machine(devices=["NVIDIA H200"]), "devices: one CUDA device; a group on one host needs at least 2"),
    "sm_80": (Machine(capability=(8, 0)), "compute capability 8.0: the kernel needs 9.0 or later"),
    "no peer access": (
        Machine(peers=False),
        "links: no peer access: 0 -> 1, 1 -> 0; groups with such pairs run unfused",
    ),
    "no FlashInfer": (Machine(packages={}), "flashinfer-python is not installed; install flashinfer-python >= 0.7.2"),
    "old FlashInfer": (Machine(packages={"flashinfer-python": "0.7.0"}), "flashinfer-python 0.7.0 is too old; install"),
    "other cubin": (
        Machine(packages={"flashinfer-python": "0.7.4", "flashinfer-cubin": "0.7.2"}),
        "flashinfer-cubin 0.7.2 is not of the release of flashinfer-python 0.7.4; install flashinfer-cubin==0.7.4",
    ),
    "other jit-cache": (
        Machine(packages={"flashinfer-python": "0.7.4", "flashinfer-jit-cache": "0.7.3+cu130"}),
        "flashinfer-jit-cache 0.7.3+cu130 is not of the release of flashinfer-python 0.7.4",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_keeps_everything_from_fusing(name: str) -> None:
    there, text = BAD[name]
    failed = found(there, "fail")
    assert any(text in one for one in failed), failed
    with there.installed():
        result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert said["can_fuse"] is False
    failed_there = [finding["text"] for finding in said["findings"] if finding["status"] == "fail"]
    assert any((text.partition(": ")[2] or text) in one for one in failed_there)


def test_builds_of_one_release_are_the_same() -> None:
    same = {"flashinfer-python": "0.7.4", "flashinfer-jit-cache": "0.7.4+cu130", "flashinfer-cubin": "0.7.4"}
    assert found(Machine(packages=same), "fail") == []


def test_what_is_worth_knowing() -> None:
    notes = "\n".join(found(Machine(built=False, devices=["NVIDIA GB300", "NVIDIA H200"]), "note"))
    assert "its all-reduce kernels are not compiled yet" in notes
    assert "devices differ (NVIDIA GB300, NVIDIA H200): groups over unlike ones run unfused" in notes
    assert "2 ranks: up to 16 MiB at hidden size 4096 (default); `python -m fusion_passes tune` measures" in notes


def test_profile_and_switch_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("FUSION_PASSES_TUNING_PROFILE", str(path))
    assert any("No such file" in text for text in found(Machine(), "fail"))
    path.write_text(profiles.profile(torch=str(torch.__version__)).to_json())
    assert any("2 x NVIDIA H200, 2026-11-30" in text for text in found(Machine(), "ok"))
    other = Machine(devices=["NVIDIA B200"] * 2)
    assert any("measured with device 'NVIDIA H200', here is 'NVIDIA B200'" in text for text in found(other, "fail"))
    monkeypatch.delenv("FUSION_PASSES_TUNING_PROFILE")
    monkeypatch.setenv("FUSION_PASSES_FUSE_ALLREDUCE_RMS", "0")
    assert found(Machine(), "fail") == ["switch: FUSION_PASSES_FUSE_ALLREDUCE_RMS=0 turns the pass off"]
    monkeypatch.setenv("FUSION_PASSES_FUSE_ALLREDUCE_RMS", "yes")
    assert "must be 0 or 1" in found(Machine(), "fail")[0]


@pytest.mark.usefixtures("fake_group")
def test_process_group() -> None:
    assert "process group: default group of 2 ranks" in found(Machine(), "ok")


def test_command_shows_a_table() -> None:
    with Machine().installed():
        result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "fusion can run here" in result.stdout
    assert "peer access between all 2 devices" in result.stdout


class OnCuda(Environment):
    """The installed machine, asked about a GPU whatever the tensors of the test are on."""

    def __init__(self, world_size: int = 2) -> None:
        self.size = world_size

    def world_size(self, group: Any) -> int:
        return self.size

    def device_refusal(self, device: torch.device) -> str | None:
        return super().device_refusal(CUDA) or self._domain()

    def flashinfer_refusal(self, device: torch.device) -> str | None:
        return super().flashinfer_refusal(CUDA)

    def _domain(self) -> str | None:
        return domain.shape_refusal(HIDDEN, torch.bfloat16, self.size)


REASONS: dict[str, tuple[Callable[[], Machine], int, str]] = {
    "no CUDA": (lambda: BAD["no CUDA"][0], 2, "device: no CUDA device"),
    "sm_80": (lambda: BAD["sm_80"][0], 2, "device: compute capability 8.0: the kernel needs 9.0 or later"),
    "world size 3": (Machine, 3, "device: world size 3: the kernel serves (2, 4, 8, 16)"),
    "world size 1": (Machine, 1, "single_rank: process group '0' has one rank; nothing to reduce"),
    "no group": (Machine, 0, "group_unknown: process group '0' does not exist on this rank"),
    **{
        name: (lambda name=name: BAD[name][0], 2, f"flashinfer: {BAD[name][1]}")  # type: ignore[misc]
        for name in ("no FlashInfer", "old FlashInfer", "other cubin", "other jit-cache")
    },
}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", REASONS)
@pytest.mark.parametrize("path", ["fused", "auto", "overlap"])
def test_each_is_a_no_op_with_the_reason_in_the_report(name: str, path: Any) -> None:
    make, world_size, reason = REASONS[name]
    with make().installed(compiling=True):
        passes = (AllReduceRMSFusionPass(FusionConfig(norm_path=path), OnCuda(world_size)),)
        captured = capture(AddNorm(NORMS["meta"]()), *tensors(2, 8, HIDDEN), passes=passes)
    (site,) = captured.sites
    assert not site.fused
    assert str(site.reason).startswith(reason)
    assert captured.after == captured.before


def test_a_flashinfer_without_a_format_fuses_the_others() -> None:
    old = Machine(capability=(10, 0), packages={"flashinfer-python": "0.7.2.post1"})
    told = "flashinfer-python 0.7.2.post1 has no MXFP8 in its kernel; install >= 0.7.4"
    assert [line for line in found(old, "note") if "FP" in line] == [f"quantisation: mxfp8 does not fuse: {told}"]
    with old.installed():
        refusals = {name: Environment().quantisation_refusal(CUDA, Quantisation(FORMATS[name])) for name in FORMATS}
    assert refusals == dict.fromkeys(FORMATS) | {"mxfp8": told}
