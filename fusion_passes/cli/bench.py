"""The bench command: what the pass costs, and what it gains on two GPUs, as tables, as JSON and as a plot."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from custom_ops import flashinfer_adapter
from fusion_passes import compat, ranks
from fusion_passes.bench import decode_step, op_sweep, pass_cost
from fusion_passes.bench.decode_step import Step
from fusion_passes.bench.op_sweep import Point
from fusion_passes.bench.pass_cost import Cost

WORLD_SIZE = 2
SMALL = (1, 16, 128, 1024)
"""Tokens at which quantised chains are measured."""
STATUS = Console(stderr=True)


@dataclass(frozen=True)
class Measured:
    """Everything one run measured on GPUs, with where."""

    device: str
    torch_version: str
    flashinfer_version: str | None
    world_size: int
    op: list[Point]
    quantised: list[Point]
    decode: list[Step]


def run(hidden: int, batches: list[int], layers: list[int], png: Path | None, json: bool) -> int:
    """Measure and show; the exit status is 0 also where there are no GPUs, which is said."""
    with STATUS.status("compiling, to see what the pass costs"):
        costs = pass_cost.sweep(layers)
    measured, missing = None, _missing()
    if missing:
        STATUS.print(missing, markup=False, highlight=False)
    else:
        measured = ranks.spawn(measure, hidden, batches, world_size=WORLD_SIZE)[0]
    if png is not None and measured is not None:
        from fusion_passes.bench import plot

        plot.op_sweep(measured.op, f"{measured.device}, {WORLD_SIZE} ranks, hidden size {hidden}", png)
    if json:
        gpus = asdict(measured) if measured else {"not_measured": missing}
        print(jsonlib.dumps({"pass_cost": [asdict(cost) for cost in costs], **gpus}))
        return 0
    console = Console()
    console.print(_costs(costs))
    if measured:
        _show(console, measured)
    return 0


def _missing() -> str | None:
    """Why nothing can be measured on GPUs."""
    if ranks.default_backend(WORLD_SIZE) == "nccl":
        return None
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return f"op sweep and decoding step need {WORLD_SIZE} CUDA devices, found {found}: not measured"


def measure(hidden: int, batches: list[int]) -> Measured:
    """On one rank: all measurements. Collective over the default group."""
    with compat.without_caches():
        return Measured(
            device=torch.cuda.get_device_name(),
            torch_version=compat.TORCH_VERSION,
            flashinfer_version=flashinfer_adapter.version(),
            world_size=WORLD_SIZE,
            op=op_sweep.sweep(hidden),
            decode=[decode_step.measure(batch, linears=kind) for kind in decode_step.LINEARS for batch in batches],
            quantised=[point for kind in op_sweep.FORMATS for point in op_sweep.sweep(hidden, SMALL, format=kind)],
        )


def _costs(costs: list[Cost]) -> Table:
    table = Table(title="the pass, in a compilation of a Llama-shaped stack on CPU tensors")
    for column in ("layers", "nodes", "all-reduces", "ms per all-reduce", "pass, s", "Inductor, s", "share", "all, s"):
        table.add_column(column, justify="right")
    for cost in costs:
        numbers = (f"{cost.ms_per_site:.2f}", f"{cost.in_pass:.3f}", f"{cost.in_inductor:.1f}", f"{cost.share:.2%}")
        table.add_row(str(cost.layers), str(cost.nodes), str(cost.sites), *numbers, f"{cost.whole:.1f}")
    return table


def _show(console: Console, measured: Measured) -> None:
    console.print(
        f"{measured.world_size} x {measured.device}, torch {measured.torch_version}, "
        f"FlashInfer {measured.flashinfer_version}; microseconds, median"
    )
    console.print(_points("all-reduce, add, RMSNorm", measured.op))
    console.print(_points("all-reduce, add, RMSNorm, quantisation", measured.quantised))
    table = Table(title="decoding step of a Llama-8B-shaped stack, per layer")
    for column in ("linear layers", "batch", "fused", "norms only", "ratio", "stock", "ratio", "sites fused"):
        table.add_column(column, justify="right")
    for step in measured.decode:
        fused, norms, stock = step.fused.median, step.norms, step.stock.median
        only = ("", "") if norms is None else (f"{norms.median:.1f}", f"{stock / norms.median:.2f}")
        numbers = (*only, f"{stock:.1f}", f"{stock / fused:.2f}", str(step.sites))
        table.add_row(step.linears, str(step.batch), f"{fused:.1f}", *numbers)
    console.print(table)


def _points(title: str, points: list[Point]) -> Table:
    table = Table(title=title)
    for column in ("format", "tokens", "ran", "fused", "stock", "ratio", "stock in place", "ratio"):
        table.add_column(column, justify="right")
    for point in points:
        fused, stock, in_place = point.fused.median, point.stock.median, point.stock_in_place.median
        row = (point.format or "", point.tokens, point.strategy, f"{fused:.1f}", f"{stock:.1f}", f"{stock / fused:.2f}")
        table.add_row(*map(str, row), f"{in_place:.1f}", f"{in_place / fused:.2f}")
    return table
