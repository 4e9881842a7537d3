"""The bench command: what the pass costs, and what it gains on GPUs, as tables, as JSON and as plots."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track

from custom_ops import domain, flashinfer_adapter, limits
from custom_ops.limits import Limits
from fusion_passes import compat, ranks
from fusion_passes.bench import decode_step, op_sweep, pass_cost, pdl
from fusion_passes.bench.decode_step import Step
from fusion_passes.bench.op_sweep import Point
from fusion_passes.bench.pdl import Overlapped
from fusion_passes.cli import bench_view

SMALL = (1, 16, 128, 1024)
"""Tokens at which quantised chains are measured."""
PARTS = ("pass", "op", "step", "pdl")
STATUS = Console(stderr=True)
T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """What to measure on GPUs.

    Attributes:
        parts: some of PARTS.
        hidden: hidden size of the op sweep.
        batches: tokens of the steps.
        models: shapes of the steps, of stack.MODELS.
        attribute: whether to ask the profiler where the time of the steps goes.
    """

    parts: list[str]
    hidden: int
    batches: list[int]
    models: list[str]
    attribute: bool = False


@dataclass(frozen=True)
class Measured:
    """Everything one run measured on GPUs, with where."""

    device: str
    torch_version: str
    flashinfer_version: str | None
    world_size: int
    limits: Limits
    op: list[Point] = field(default_factory=list)
    quantised: list[Point] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    pdl: list[Overlapped] = field(default_factory=list)


def run(asked: Asked, layers: list[int], png: Path | None, steps_png: Path | None, json: bool) -> int:
    """Measure and show; the exit status is 0 also where there are no GPUs, which is said."""
    costs, measured, missing = [], None, missing_gpus()
    if not dist.is_torchelastic_launched() and "pass" in asked.parts:
        with STATUS.status("compiling, to see what the pass costs"):
            costs = pass_cost.sweep(layers)
    on_gpus = [part for part in asked.parts if part != "pass"]
    if missing and on_gpus:
        STATUS.print(f"{', '.join(on_gpus)}: not measured, {missing}", markup=False, highlight=False)
    elif on_gpus:
        found = ranks.run(measure, asked, world_size=ranks_here())
        if found is None:
            return 0
        measured = found[0]
        _plot(measured, asked.hidden, png, steps_png)
    if json:
        gpus = asdict(measured) if measured else {"not_measured": missing}
        print(jsonlib.dumps({"pass_cost": [asdict(cost) for cost in costs], **gpus}))
        return 0
    bench_view.show(Console(), costs, measured)
    return 0


def ranks_here() -> int:
    """As many ranks as there are GPUs and the kernel serves."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return max((count for count in domain.WORLD_SIZES if count <= found), default=0)


def missing_gpus() -> str | None:
    """Why nothing can be measured on GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return None if ranks_here() else f"needs at least 2 CUDA devices, found {found}"


def measure(asked: Asked) -> Measured:
    """On one rank: all measurements. Collective over the default group."""
    device, world_size = torch.cuda.get_device_name(), dist.get_world_size()
    measured = Measured(
        device=device,
        torch_version=compat.TORCH_VERSION,
        flashinfer_version=flashinfer_adapter.version(),
        world_size=world_size,
        limits=limits.for_device(device, world_size),
    )
    with compat.without_caches():
        if "op" in asked.parts:
            points = op_sweep.sweep(asked.hidden)
            measured.op.extend(watched(points, len(op_sweep.TOKENS), "all-reduce, add, RMSNorm"))
            for kind in op_sweep.FORMATS:
                points = op_sweep.sweep(asked.hidden, SMALL, format=kind, compared=("fused", "overlap", "stock"))
                measured.quantised.extend(watched(points, len(SMALL), f"the same and {kind}"))
        if "step" in asked.parts:
            plan = [
                (model, kind, batch) for model in asked.models for kind in _linears(model) for batch in asked.batches
            ]
            steps = (_step(*one, asked.attribute) for one in plan)
            measured.steps.extend(watched(steps, len(plan), "steps of decoder layers"))
        if "pdl" in asked.parts:
            measured.pdl.extend(watched(pdl.measure(), pdl.COUNT, "triggers and consumers"))
    return measured


def _linears(model: str) -> tuple[str, ...]:
    return decode_step.LINEARS if model == "llama-8b" else ("bf16",)


def _step(model: str, linears: str, batch: int, attribute: bool) -> Step:
    compared = decode_step.COMPARED if linears == "bf16" else ("fused", "norms", "overlap", "stock")
    return decode_step.measure(batch, model, linears, compared, attribute=attribute)


def watched(found: Iterable[T], count: int, what: str) -> Iterator[T]:
    """The same, with a progress bar on the first rank's standard error."""
    yield from track(found, what, total=count, console=STATUS, disable=dist.get_rank() != 0)


def _plot(measured: Measured, hidden: int, png: Path | None, steps_png: Path | None) -> None:
    from fusion_passes.bench import plot

    where = f"{measured.world_size} x {measured.device}, torch {measured.torch_version}"
    if png is not None and measured.op:
        plot.op_sweep(measured.op, measured.limits, f"all-reduce, add, RMSNorm of {hidden}: {where}", png)
    if steps_png is not None and measured.steps:
        plot.steps(measured.steps, where, steps_png)
