"""Where the time of a captured step goes: torch's profiler, kernels by kind, and the time in which none runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("all-reduce", ("allreduce", "all_reduce", "nccldevkernel")),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("matrix products", ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "cublas")),
    ("Inductor's kernels", ("triton_",)),
)
"""Kinds of kernels with parts of their names, in small letters; the first that fits. The rest is "other kernels"."""

OTHER, IDLE = "other kernels", "between kernels"
Interval = tuple[str, float, float]
"""Name, start and end in microseconds."""


def by_kind(fn: Callable[[], object], replays: int = 7) -> dict[str, float]:
    """Microseconds of one call of fn(), captured into a CUDA graph, by kind of kernel; all ranks take part.

    The median of some replays; in the first, ranks still wait for each other.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        fn()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(replays + 1):
            graph.replay()
        torch.cuda.synchronize()
    events = [event for event in found.events() or () if event.device_type == DeviceType.CUDA]
    intervals = sorted(((one.name, one.time_range.start, one.time_range.end) for one in events), key=_start)
    kernels = len(intervals) // (replays + 1)
    one_by_one = [attribute(intervals[at * kernels : (at + 1) * kernels]) for at in range(1, replays + 1)]
    kinds = dict.fromkeys(kind for one in one_by_one for kind in one)
    return {kind: statistics.median(one.get(kind, 0.0) for one in one_by_one) for kind in kinds}


def _start(interval: Interval) -> float:
    return interval[1]


def attribute(intervals: Iterable[Interval]) -> dict[str, float]:
    """Time by kind, of intervals that may overlap: what two kernels share belongs to the one that began first."""
    ordered: Sequence[Interval] = sorted(intervals, key=lambda interval: interval[1:])
    found: Counter[str] = Counter()
    reached = ordered[0][1] if ordered else 0.0
    for name, start, end in ordered:
        found[IDLE] += max(0.0, start - reached)  # type: ignore[assignment]
        found[_kind(name)] += max(0.0, end - max(start, reached))  # type: ignore[assignment]
        reached = max(reached, end)
    return dict(found)


def _kind(name: str) -> str:
    small = name.lower()
    return next((kind for kind, parts in KINDS if any(part in small for part in parts)), OTHER)
