"""Time on the device, under CUDA graphs, so that launches from the host do not count."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

WARMUP = 3
HOST_LEAD_CYCLES = 2_000_000
"""About a millisecond: enough for the host to queue a replay."""


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over replays, and the quartiles around it."""

    median: float
    low: float
    high: float


def per_call(
    fn: Callable[[], object], calls: int, replays: int = 50, before_replay: Callable[[], object] | None = None
) -> Timing:
    """Time of fn(), captured `calls` times into one CUDA graph that is replayed.

    All ranks of the default group take part. Before each replay the device waits until the host has queued everything,
    and then for the other ranks, so that neither counts.

    Args:
        fn: work to capture; already warm.
        calls: repetitions in the graph.
        replays: timed replays, after three that are not.
        before_replay: work outside of the timing, such as restoring inputs.
    """
    graph = torch.cuda.CUDAGraph()
    aligned = torch.zeros(1, device="cuda")
    dist.all_reduce(aligned)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    samples = []
    for index in range(replays + WARMUP):
        if before_replay is not None:
            before_replay()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HOST_LEAD_CYCLES)
        dist.all_reduce(aligned)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if index >= WARMUP:
            samples.append(start.elapsed_time(end) * 1000 / calls)
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, low, high)


def slowest(timing: Timing) -> Timing:
    """The timing of the rank whose median is largest, on all ranks."""
    everyone: list[Timing | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, timing)
    return max((one for one in everyone if one is not None), key=lambda one: one.median)
