"""Which strategy is fastest on this machine, by size, and the sizes at which that changes: a tuning profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from custom_ops import domain, flashinfer_adapter, limits, machine, workspace
from custom_ops.group_state import GroupState
from custom_ops.limits import Limits, Row
from custom_ops.profile import Measurement, Profile
from fusion_passes import compat
from fusion_passes.bench import op_sweep, paths
from fusion_passes.bench.op_sweep import Chain
from fusion_passes.environment import Environment

HIDDEN = (2048, 4096, 7168, 8192)
ENOUGH = 0.995
"""The all-reduce alone counts as fast as the fused op from this share on: what repeated runs differ by."""


class Unlimited(Environment):
    """This machine, with everything fused that fits into a workspace."""

    def limits(self, device: torch.device, world_size: int) -> Limits:
        """The largest size that is safe."""
        most = domain.max_capacity(world_size)
        return Limits(most, most, "as far as the kernel goes")


def measure(
    hidden: Sequence[int],
    tokens: Sequence[int],
    dtypes: Sequence[torch.dtype],
    done: Callable[[], None] = lambda: None,
) -> Profile:
    """Measure on the current GPUs; collective over the default group, and the same on all ranks.

    Args:
        hidden: hidden sizes.
        tokens: rows.
        dtypes: of the activations.
        done: called after each size.
    """
    group, device = dist.group.WORLD, machine.default_device()
    assert group is not None
    state = workspace.state_of(group, device)
    if state.problem:
        raise RuntimeError(f"nothing can run fused here, so there is nothing to tune: {state.problem}")
    before, points, equal = state.limits, [], True
    try:
        with torch.inference_mode(), compat.without_caches():
            for dtype in dtypes:
                for size in hidden:
                    for point, same in _points(Chain(size, dtype), tokens, state):
                        points.append(point)
                        equal = equal and same
                        done()
    finally:
        state.limit_to(before)
    return Profile(
        device=machine.name(device),
        world_size=group.size(),
        torch=str(torch.__version__),
        flashinfer=str(flashinfer_adapter.version()),
        date=date.today().isoformat(),
        strategies_equal=equal,
        crossovers=crossovers(points, equal),
        points=tuple(points),
    )


def _points(chain: Chain, tokens: Sequence[int], state: GroupState) -> Iterator[tuple[Measurement, bool]]:
    """Each size, and whether both strategies gave the same bits there on all ranks."""
    size = dist.get_world_size()
    most = domain.max_capacity(size)
    forced = {"one_shot": Limits(most, most, "one-shot only"), "two_shot": Limits(0, most, "two-shot only")}
    for count in tokens:
        x, residual = chain.inputs(count)
        fits = x.nbytes <= most
        unfused = op_sweep.time(chain.compiled(paths.STOCK), x, residual).median
        times: dict[str, float | None] = {"one_shot": None, "two_shot": None, "overlap": None}
        results: list[Any] = []
        fused = chain.compiled("fused", environment=Unlimited()) if fits else None
        for name, limited in forced.items():
            if fused is None or limits.choose(limited, count, chain.hidden, x.itemsize, size).value != name:
                continue
            state.limit_to(limited)
            times[name] = _round(op_sweep.time(fused, x, residual).median)
            results.append(fused(x, residual))
        if fits:
            state.limit_to(forced["one_shot"])
            overlap = chain.compiled("overlap", environment=Unlimited())
            times["overlap"] = _round(op_sweep.time(overlap, x, residual).median)
        dtype = str(chain.dtype).removeprefix("torch.")
        yield Measurement(count, chain.hidden, dtype, unfused=_round(unfused), **times), _everywhere(_same(results))


def crossovers(points: Sequence[Measurement], strategies_equal: bool) -> tuple[Row, ...]:
    """For each hidden size, where each strategy stops to be the fastest.

    A limit is the largest measured message up to which, whatever the type, nothing was slower than what it is measured
    against; so none of the sizes that were measured gets slower.

    Args:
        points: what was measured.
        strategies_equal: whether both strategies give the same bits; otherwise the one that serves more is taken alone.
    """
    sizes = sorted({point.hidden for point in points})
    return tuple(_row([point for point in points if point.hidden == size], strategies_equal) for size in sizes)


def _row(points: Sequence[Measurement], strategies_equal: bool) -> Row:
    def served_by(strategy: Callable[[Measurement], float | None]) -> int:
        return _largest(points, lambda point: (strategy(point), point.unfused))

    if strategies_equal:
        two_shot = served_by(_fused)
        one_shot = min(two_shot, _largest(points, lambda point: (point.one_shot, point.two_shot)))
    else:
        one_alone, two_alone = (served_by(attrgetter(name)) for name in ("one_shot", "two_shot"))
        one_shot, two_shot = (one_alone, one_alone) if one_alone >= two_alone else (0, two_alone)
    overlap = _largest(points, lambda point: (point.overlap, _fused(point)), ENOUGH)
    return Row(points[0].hidden, one_shot, two_shot, min(two_shot, overlap))


def _fused(point: Measurement) -> float | None:
    """The faster of both strategies."""
    return min((one for one in (point.one_shot, point.two_shot) if one is not None), default=None)


def _largest(
    points: Sequence[Measurement],
    compare: Callable[[Measurement], tuple[float | None, float | None]],
    enough: float = 1.0,
) -> int:
    """The largest message that the first of two serves as fast as the second, with all smaller ones, at every type.

    A size that the first cannot serve ends its range; one that the second cannot serve is the first's. The first is as
    fast as the second where the second takes at least this share of its time.
    """
    found = []
    for dtype in {point.dtype for point in points}:
        served = 0
        for point in sorted((one for one in points if one.dtype == dtype), key=lambda one: one.nbytes):
            mine, other = compare(point)
            if mine is None or (other is not None and other < mine * enough):
                break
            served = point.nbytes
        found.append(served)
    return min(found, default=0)


def _round(time: float) -> float:
    return round(time, 2)


def _same(results: Sequence[Any]) -> bool:
    if len(results) < 2:
        return True
    one, two = results
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def _everywhere(here: bool) -> bool:
    found = torch.tensor(int(here), device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found.item())
