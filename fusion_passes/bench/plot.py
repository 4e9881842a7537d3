"""Plots of what was measured (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from custom_ops.limits import Limits
from custom_ops.profile import Measurement
from fusion_passes.bench.attribution import IDLE
from fusion_passes.bench.decode_step import Step
from fusion_passes.bench.op_sweep import Point
from fusion_passes.bench.paths import STOCK


def op_sweep(points: Sequence[Point], limits: Limits | None, title: str, path: Path) -> None:
    """How many times faster than stock each path is, by size of the message, with the quartiles and the limits."""
    figure, axes = _new(title)
    sizes = [point.nbytes for point in points]
    for name in (name for name in points[0].timings if name != STOCK):
        ratios = [point.ratio(name) for point in points]
        (line,) = axes.plot(sizes, ratios, marker="o", label=name)
        stock = [point.timings[STOCK].median for point in points]
        low = [time / point.timings[name].high for time, point in zip(stock, points, strict=True)]
        high = [time / point.timings[name].low for time, point in zip(stock, points, strict=True)]
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    _draw_limits(axes, limits and limits.at(points[0].hidden))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="message, bytes", ylabel="stock time / time")
    _save(figure, axes, path)


def profile(points: Sequence[Measurement], limits: Limits, title: str, path: Path) -> None:
    """The measurements of a tuning profile: a line for each strategy and hidden size, with its limit."""
    figure, axes = _new(title)
    styles = {"one_shot": ("-", "one-shot"), "two_shot": ("--", "two-shot"), "overlap": (":", "all-reduce alone")}
    for number, hidden in enumerate(sorted({point.hidden for point in points})):
        for name, (style, words) in styles.items():
            found = [(point, getattr(point, name)) for point in points if point.hidden == hidden]
            served = [(point.nbytes, point.unfused / time) for point, time in found if time is not None]
            if served:
                line = zip(*sorted(served), strict=True)
                axes.plot(*line, style, color=f"C{number}", label=f"{words}, hidden size {hidden}")
        axes.axvline(limits.at(hidden).two_shot_bytes, color=f"C{number}", linewidth=0.8)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="message, bytes", ylabel="unfused time / time")
    _save(figure, axes, path)


def steps(found: Sequence[Step], title: str, path: Path) -> None:
    """Where the time of a layer goes, a bar for each step and path, by kind of kernel."""
    figure, axes = _new(title)
    bars = [(f"{step.model}\n{step.batch}, {name}", kinds) for step in found for name, kinds in step.kernels.items()]
    kinds = sorted({kind for _, one in bars for kind in one}, key=lambda kind: (kind == IDLE, kind))
    below = [0.0] * len(bars)
    for kind in kinds:
        times = [one.get(kind, 0.0) for _, one in bars]
        axes.barh([name for name, _ in bars], times, left=below, label=kind)
        below = [a + b for a, b in zip(below, times, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="microseconds per layer")
    axes.tick_params(axis="y", labelsize=7)
    figure.set_size_inches(8, 1.5 + 0.32 * len(bars))
    _save(figure, axes, path)


def _draw_limits(axes: Any, limits: Limits | None) -> None:
    if limits is None:
        return
    for name, nbytes in (("one-shot", limits.one_shot_bytes), ("two-shot", limits.two_shot_bytes)):
        if nbytes:
            axes.axvline(nbytes, color="grey", linestyle="--" if name == "one-shot" else ":", label=f"limit, {name}")


def _new(title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.set_title(title, fontsize=10)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
