"""The tune command: measure this machine's strategies and write the profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from custom_ops import profile
from custom_ops.limits import MIB
from custom_ops.profile import Measurement, Profile
from fusion_passes import ranks
from fusion_passes.bench import op_sweep
from fusion_passes.bench import tune as measuring
from fusion_passes.cli.bench import STATUS, missing_gpus, ranks_here


def run(
    out: Path, hidden: list[int] | None, dtypes: list[str], tokens: list[int] | None, png: Path | None, json: bool
) -> int:
    """Measure, write and show; exit status 1 where there is nothing to measure on."""
    if unknown := sorted(set(dtypes) - set(profile.DTYPES)):
        raise typer.BadParameter(f"--dtype {unknown}: must be among {', '.join(profile.DTYPES)}")
    if missing := missing_gpus():
        STATUS.print(f"nothing to tune: {missing}", markup=False, highlight=False)
        return 1
    sizes = hidden or list(measuring.HIDDEN), tokens or list(op_sweep.TOKENS)
    found = ranks.run(measure, *sizes, dtypes, world_size=ranks_here())
    if found is None:
        return 0
    tuned: Profile = profile.parse(found[0])
    out.write_text(tuned.to_json())
    if png is not None:
        from fusion_passes.bench import plot

        plot.profile(tuned.points, tuned.limits, f"{tuned.world_size} x {tuned.device}, torch {tuned.torch}", png)
    if json:
        print(tuned.to_json(), end="")
    else:
        _show(tuned, out)
    return 0


def measure(hidden: Sequence[int], tokens: Sequence[int], dtypes: Sequence[str]) -> str:
    """On one rank: the profile as text. Collective over the default group."""
    types = [getattr(torch, name) for name in dtypes]
    with Progress(console=STATUS, disable=dist.get_rank() != 0) as progress:
        task = progress.add_task("sizes", total=len(hidden) * len(tokens) * len(types))
        return measuring.measure(hidden, tokens, types, lambda: progress.advance(task)).to_json()


def _show(tuned: Profile, out: Path) -> None:
    table = Table(title=f"{tuned.world_size} x {tuned.device}, microseconds")
    for column in ("hidden", "type", "tokens", "MiB", "one-shot", "two-shot", "all-reduce alone", "unfused"):
        table.add_column(column, justify="right")
    for point in tuned.points:
        table.add_row(*_row(point))
    console = Console()
    console.print(table)
    for row in tuned.crossovers:
        console.print(
            f"hidden size {row.hidden}: one-shot up to {row.one_shot_bytes / MIB:g} MiB, two-shot up to "
            f"{row.two_shot_bytes / MIB:g} MiB, the all-reduce alone up to {row.overlap_bytes / MIB:g} MiB",
            highlight=False,
        )
    same = "give" if tuned.strategies_equal else "do not give, so only one is used,"
    console.print(f"both strategies {same} the same bits", highlight=False)
    console.print(f"FusionConfig(tuning_profile={str(out)!r}) uses it", markup=False, highlight=False)


def _row(point: Measurement) -> list[str]:
    times = (point.one_shot, point.two_shot, point.overlap, point.unfused)
    shown = ["" if time is None else f"{time:.1f}" for time in times]
    return [str(point.hidden), point.dtype, str(point.tokens), f"{point.nbytes / MIB:.2f}", *shown]
