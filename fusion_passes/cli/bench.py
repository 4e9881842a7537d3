"""The bench command: measurements on two GPUs, as tables, as JSON and as a plot."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from custom_ops import flashinfer_adapter
from fusion_passes import compat, ranks
from fusion_passes.bench import decode_step, op_sweep
from fusion_passes.bench.decode_step import Step
from fusion_passes.bench.op_sweep import Point

WORLD_SIZE = 2
STATUS = Console(stderr=True)


@dataclass(frozen=True)
class Measured:
    """Everything one run measured, with where."""

    device: str
    torch_version: str
    flashinfer_version: str | None
    world_size: int
    op: list[Point]
    decode: list[Step]


def run(hidden: int, batches: list[int], png: Path | None, json: bool) -> int:
    """Measure and show; the exit status is 0 if everything was measured."""
    if ranks.default_backend(WORLD_SIZE) != "nccl":
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        STATUS.print(f"bench needs {WORLD_SIZE} CUDA devices and finds {found}: nothing was measured", markup=False)
        return 1
    measured = ranks.spawn(measure, hidden, batches, world_size=WORLD_SIZE)[0]
    if png is not None:
        from fusion_passes.bench import plot

        plot.op_sweep(measured.op, f"{measured.device}, {WORLD_SIZE} ranks, hidden size {hidden}", png)
    if json:
        print(jsonlib.dumps(asdict(measured)))
    else:
        _show(Console(), measured)
    return 0


def measure(hidden: int, batches: list[int]) -> Measured:
    """On one rank: all measurements. Collective over the default group."""
    with compat.without_caches():
        return Measured(
            device=torch.cuda.get_device_name(),
            torch_version=compat.TORCH_VERSION,
            flashinfer_version=flashinfer_adapter.version(),
            world_size=WORLD_SIZE,
            op=op_sweep.sweep(hidden),
            decode=[decode_step.measure(batch) for batch in batches],
        )


def _show(console: Console, measured: Measured) -> None:
    console.print(
        f"{measured.world_size} x {measured.device}, torch {measured.torch_version}, "
        f"FlashInfer {measured.flashinfer_version}; microseconds, median"
    )
    table = Table(title="all-reduce, add, RMSNorm")
    for column in ("tokens", "ran", "fused", "stock", "ratio", "stock in place", "ratio"):
        table.add_column(column, justify="right")
    for point in measured.op:
        fused, stock, in_place = point.fused.median, point.stock.median, point.stock_in_place.median
        row = (point.tokens, point.strategy, f"{fused:.1f}", f"{stock:.1f}", f"{stock / fused:.2f}")
        table.add_row(*map(str, row), f"{in_place:.1f}", f"{in_place / fused:.2f}")
    console.print(table)
    table = Table(title="decoding step of a Llama-8B-shaped stack, per layer")
    for column in ("batch", "fused", "stock", "ratio", "sites fused"):
        table.add_column(column, justify="right")
    for step in measured.decode:
        fused, stock = step.fused.median, step.stock.median
        table.add_row(str(step.batch), f"{fused:.1f}", f"{stock:.1f}", f"{stock / fused:.2f}", str(step.sites))
    console.print(table)
