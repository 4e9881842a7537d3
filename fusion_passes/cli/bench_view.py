"""Tables of what the bench command measured (rich)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fusion_passes.bench.decode_step import Step
from fusion_passes.bench.op_sweep import Point
from fusion_passes.bench.pass_cost import Cost
from fusion_passes.bench.paths import STOCK
from fusion_passes.bench.pdl import Overlapped
from fusion_passes.bench.timing import Timing

if TYPE_CHECKING:
    from fusion_passes.cli.bench import Measured


def show(console: Console, costs: Sequence[Cost], measured: Measured | None) -> None:
    """Print every table for which there is something."""
    if costs:
        console.print(_costs(costs))
    if measured is None:
        return
    console.print(
        f"{measured.world_size} x {measured.device}, torch {measured.torch_version}, "
        f"FlashInfer {measured.flashinfer_version}; microseconds: median (quartiles), times stock"
    )
    for title, points in (("all-reduce, add, RMSNorm", measured.op), ("and a quantisation", measured.quantised)):
        if points:
            console.print(_points(title, points))
    if measured.steps:
        console.print(_steps(measured.steps))
    for step in (step for step in measured.steps if step.kernels):
        console.print(_kernels(step))
    if measured.pdl:
        console.print(_triggers(measured.pdl))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _timing(timing: Timing, stock: Timing | None = None) -> str:
    ratio = "" if stock is None else f", {stock.median / timing.median:.2f}"
    return f"{timing.median:.1f} ({timing.low:.1f}-{timing.high:.1f}){ratio}"


def _costs(costs: Sequence[Cost]) -> Table:
    columns = ("layers", "nodes", "all-reduces", "ms per all-reduce", "pass, s", "Inductor, s", "share", "all, s")
    table = _table("the pass, in a compilation of a Llama-shaped stack on CPU tensors", *columns)
    for cost in costs:
        numbers = (f"{cost.ms_per_site:.2f}", f"{cost.in_pass:.3f}", f"{cost.in_inductor:.1f}", f"{cost.share:.2%}")
        table.add_row(str(cost.layers), str(cost.nodes), str(cost.sites), *numbers, f"{cost.whole:.1f}")
    return table


def _points(title: str, points: Sequence[Point]) -> Table:
    names = list(points[0].timings)
    table = _table(title, "format", "hidden", "tokens", "fused ran", *names)
    for point in points:
        stock = point.timings[STOCK]
        times = (_timing(time, None if name == STOCK else stock) for name, time in point.timings.items())
        table.add_row(point.format or "", str(point.hidden), str(point.tokens), point.ran["fused"], *times)
    return table


def _steps(steps: Sequence[Step]) -> Table:
    names = list(dict.fromkeys(name for step in steps for name in step.timings))
    table = _table("a step of decoder layers, per layer", "model", "linear layers", "tokens", *names, "sites fused")
    for step in steps:
        stock, times = step.timings[STOCK], []
        for name in names:
            time = step.timings.get(name)
            times.append("" if time is None else _timing(time, None if name == STOCK else stock))
        table.add_row(step.model, step.linears, str(step.batch), *times, str(sum(step.rules["fused"].values())))
    return table


def _kernels(step: Step) -> Table:
    kinds = list(dict.fromkeys(kind for found in step.kernels.values() for kind in found))
    table = _table(f"where a layer's time goes: {step.model}, {step.linears}, {step.batch} tokens", "path", *kinds)
    for name, found in step.kernels.items():
        table.add_row(name, *(f"{found.get(kind, 0.0):.1f}" for kind in kinds))
    return table


def _triggers(found: Sequence[Overlapped]) -> Table:
    table = _table("an all-reduce and a consumer launched with PDL", "consumer", "tokens", "no PDL", "late", "early")
    for one in found:
        times = (_timing(one.without), _timing(one.late, one.without), _timing(one.early, one.without))
        table.add_row(one.consumer, str(one.tokens), *times)
    return table
