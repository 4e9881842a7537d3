"""What this machine can fuse and what not, and why: a table of questions, each answered in a sentence."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from custom_ops import domain, flashinfer_adapter, limits, machine, profile
from custom_ops.formats import FORMATS, Quantisation
from custom_ops.limits import MIB
from fusion_passes.config import ENVIRONMENT_FLAG, ENVIRONMENT_PROFILE

Status = Literal["ok", "note", "fail"]
NEEDED_TORCH = "2.11"
HIDDEN = 4096
"""The hidden size for which limits are shown."""

FIRST_DEVICE = torch.device("cuda", 0)
"""Whether there is one or not."""


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        name: what was looked at.
        status: "ok"; "note" for what to know; "fail" for what keeps everything from fusing.
        text: what was found, and what to do.
    """

    name: str
    status: Status
    text: str


Answer = tuple[Status, str]


def examine() -> list[Finding]:
    """Every question's answer, in the order of the table; starts no process and launches nothing."""
    return [Finding(name, *answer) for name, question in QUESTIONS for answer in question()]


def can_fuse(findings: list[Finding]) -> bool:
    """Whether nothing keeps everything from fusing."""
    return all(finding.status != "fail" for finding in findings)


def _torch() -> Iterator[Answer]:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    text = f"{torch.__version__} ({built}), Python {sys.version.split()[0]}"
    if TorchVersion(torch.__version__) < NEEDED_TORCH:
        yield "fail", f"{text}; install torch >= {NEEDED_TORCH}"
    else:
        yield "ok", text


def _flashinfer() -> Iterator[Answer]:
    if refusal := flashinfer_adapter.refusal():
        yield "fail", refusal
        return
    yield "ok", f"flashinfer-python {flashinfer_adapter.version()}"
    if _devices() and not flashinfer_adapter.is_built():
        yield (
            "note",
            "its all-reduce kernels are not compiled yet: minutes at the first call; custom_ops.prepare() does it",
        )


def _triton() -> Iterator[Answer]:
    try:
        yield "ok", f"triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        yield "note", "triton is not installed; torch.compile needs it for CUDA"


def _cuda_devices() -> Iterator[Answer]:
    devices = _devices()
    if not devices:
        yield "fail", "no CUDA device; on CPU tensors the ops run their reference, for tests"
        return
    for device in devices:
        capability = machine.capability(device) or (0, 0)
        text = f"{device}: {machine.name(device)}, compute capability {capability[0]}.{capability[1]}"
        refusal = machine.device_refusal(device)
        yield ("fail", f"{text}: {refusal}") if refusal else ("ok", text)
    names = sorted({machine.name(device) for device in devices})
    if len(names) > 1:
        yield "note", f"devices differ ({', '.join(names)}): groups over unlike ones run unfused"
    if len(devices) == 1:
        yield "fail", "one CUDA device; a group on one host needs at least 2"


def _links() -> Iterator[Answer]:
    pairs = list(permutations(range(len(_devices())), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        shown = ", ".join(f"{a} -> {b}" for a, b in apart[:4])
        yield "fail", f"no peer access: {shown}{', ...' if len(apart) > 4 else ''}; groups with such pairs run unfused"
    elif pairs:
        yield "ok", f"peer access between all {len(_devices())} devices"


def _group() -> Iterator[Answer]:
    if not dist.is_available():
        yield "fail", "torch is built without torch.distributed"
    elif not dist.is_initialized():
        yield (
            "note",
            "no process group here; each group votes at its first call, and custom_ops.launches() says how it ran",
        )
    else:
        size = dist.get_world_size()
        refusal = domain.shape_refusal(HIDDEN, torch.bfloat16, size)
        yield ("note", f"default group: {refusal}") if refusal else ("ok", f"default group of {size} ranks")


def _limits() -> Iterator[Answer]:
    devices = _devices()
    if not devices or machine.device_refusal(devices[0]):
        return
    name = machine.name(devices[0])
    for size in (size for size in domain.WORLD_SIZES if size <= max(len(devices), 2)):
        found = limits.for_device(name, size).at(HIDDEN)
        text = f"{size} ranks: up to {found.two_shot_bytes / MIB:g} MiB at hidden size {HIDDEN} ({found.source})"
        guess = found.source == limits.DEFAULTS[size].source
        yield ("note", f"{text}; `python -m fusion_passes tune` measures") if guess else ("ok", text)


def _profile() -> Iterator[Answer]:
    path = os.environ.get(ENVIRONMENT_PROFILE)
    if not path:
        return
    try:
        with open(path) as file:
            found = profile.parse(file.read())
    except (OSError, ValueError) as error:
        yield "fail", f"{ENVIRONMENT_PROFILE}={path!r}: {error}"
        return
    devices = _devices()
    here = machine.name(devices[0]) if devices else found.device
    if refusal := found.refusal(here, str(torch.__version__), flashinfer_adapter.version()):
        yield "fail", f"{ENVIRONMENT_PROFILE}={path!r}: {refusal}"
    else:
        yield "ok", f"{path}: {found.world_size} x {found.device}, {found.date}"


def _switch() -> Iterator[Answer]:
    found = os.environ.get(ENVIRONMENT_FLAG, "")
    if found == "0":
        yield "fail", f"{ENVIRONMENT_FLAG}=0 turns the pass off"
    elif found not in ("", "1"):
        yield "fail", f"{ENVIRONMENT_FLAG}={found!r}: must be 0 or 1"


def _norms() -> Iterator[Answer]:
    refusal = machine.refusal(FIRST_DEVICE)
    yield ("note", f"does not fuse: {refusal}") if refusal else ("ok", "fuses in bfloat16, float16 and float32")


def _formats() -> Iterator[Answer]:
    for name, found in FORMATS.items():
        refusal = machine.quantisation_refusal(FIRST_DEVICE, Quantisation(found))
        yield ("note", f"{name} does not fuse: {refusal}") if refusal else ("ok", f"{name} fuses")


def _devices() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


QUESTIONS: tuple[tuple[str, Callable[[], Iterator[Answer]]], ...] = (
    ("torch", _torch),
    ("FlashInfer", _flashinfer),
    ("Triton", _triton),
    ("devices", _cuda_devices),
    ("links", _links),
    ("process group", _group),
    ("limits", _limits),
    ("tuning profile", _profile),
    ("switch", _switch),
    ("all-reduce and RMSNorm", _norms),
    ("quantisation", _formats),
)
"""Every question; one may have no answer or several."""
