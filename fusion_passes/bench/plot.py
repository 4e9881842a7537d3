"""Plots of what was measured (matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusion_passes.bench.op_sweep import Point


def op_sweep(points: Sequence[Point], title: str, path: Path) -> None:
    """How many times faster than stock the fused op is, by size of the message, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    sizes = [point.nbytes for point in points]
    for label, ratios in {
        "against torch.compile": [point.stock.median / point.fused.median for point in points],
        "against torch.compile, in place": [point.stock_in_place.median / point.fused.median for point in points],
    }.items():
        axes.plot(sizes, ratios, marker="o", label=label)
    unfused = [point.nbytes for point in points if point.strategy == "not rewritten"]
    if unfused:
        axes.axvline(min(unfused), color="grey", linestyle="--", label="left alone from here on")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="message, bytes", ylabel="stock time / fused time", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
