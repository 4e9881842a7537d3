"""Many all-reduces without any synchronisation, each with new data, in poisoned buffers, before consumers with PDL.

What came out is compared on the device with what another kernel computes from the inputs of all ranks, which every rank
can draw itself. So stale data, data of a peer's earlier call, and a consumer that read too early all count as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
from custom_ops import domain, machine, workspace
from custom_ops.group_state import GroupState
from custom_ops.limits import Limits
from fusion_passes.bench import paths, pdl
from fusion_passes.bench.pdl import EPS, Trigger

SLOTS = 16
"""Calls in a row between new data and comparison; each has buffers of its own."""


@dataclass(frozen=True)
class Stressed:
    """What one kind of calls did.

    Attributes:
        consumer: one of CONSUMERS.
        tokens: rows.
        hidden: elements of a row.
        trigger: "early" or "late".
        captured: whether the calls were replayed from a CUDA graph.
        calls: all-reduces.
        wrong: values that were.
    """

    consumer: str
    tokens: int
    hidden: int
    trigger: str
    captured: bool
    calls: int
    wrong: int


@dataclass
class Slot:
    """The tensors of one call."""

    x: Tensor
    residual: Tensor
    norm: Tensor
    total: Tensor
    seen: Tensor


Call = Callable[[Slot, Trigger], None]


def _fused(slot: Slot, trigger: Trigger) -> None:
    custom_ops.call_trtllm_fused_allreduce_norm(
        slot.x, slot.residual, None, EPS, dist.get_world_size(), True, True, 0, 1, slot.norm,
        residual_out=slot.total, pdl_advance_launch_tokens=trigger.threshold,
    )  # fmt: skip


def _echo() -> Call:
    from fusion_passes.bench import pdl_kernels

    def call(slot: Slot, trigger: Trigger) -> None:
        _fused(slot, trigger)
        pdl_kernels.echo(slot.norm, slot.total, slot.seen)

    return call


def _inductor_behind_fused() -> Call:
    def consume(norm: Tensor, total: Tensor) -> Tensor:
        return norm.float() + 2 * total.float()

    compiled = torch.compile(consume, fullgraph=True, dynamic=False, options=paths.INDUCTOR_PDL)

    def call(slot: Slot, trigger: Trigger) -> None:
        _fused(slot, trigger)
        slot.seen = compiled(slot.norm, slot.total)

    return call


def _inductor_behind_plain() -> Call:
    def step(x: Tensor, residual: Tensor, early: bool) -> tuple[Tensor, Tensor, Tensor]:
        total = residual + pdl.plain_all_reduce(x, pdl.TRIGGERS["early" if early else "late"])
        norm = torch.nn.functional.rms_norm(total, total.shape[-1:], None, EPS)
        return norm, total, norm.float() + 2 * total.float()

    compiled = torch.compile(step, fullgraph=True, dynamic=False, options=paths.INDUCTOR_PDL)

    def call(slot: Slot, trigger: Trigger) -> None:
        slot.norm, slot.total, slot.seen = compiled(slot.x, slot.residual, trigger.threshold > 0)

    return call


CONSUMERS: dict[str, Callable[[], Call]] = {
    "Triton with gdc_wait": _echo,
    "Inductor behind the fused op": _inductor_behind_fused,
    "Inductor behind the plain all-reduce": _inductor_behind_plain,
}


def run(
    calls: int,
    tokens: Sequence[int] = (1, 2, 4, 8, 16),
    hidden: int = 4096,
    eager_calls: int = 0,
    consumers: Sequence[str] = tuple(CONSUMERS),
) -> list[Stressed]:
    """Stress on the current GPUs; collective over the default group, whose ranks all find the same.

    Calls alternate between one-shot and two-shot where there are more tokens than ranks.

    Args:
        calls: all-reduces in all, from CUDA graphs, shared out between all kinds.
        tokens: rows.
        hidden: elements of a row.
        eager_calls: the same, launched one by one.
        consumers: some of CONSUMERS.
    """
    group = dist.group.WORLD
    assert group is not None
    state = workspace.state_of(group, machine.default_device())
    kinds = [(consumer, count, name) for consumer in consumers for count in tokens for name in ("early", "late")]
    before, found = state.limits, []
    try:
        with torch.inference_mode():
            for consumer, count, name in kinds:
                torch._dynamo.reset()
                burst = _Burst(CONSUMERS[consumer](), count, hidden, pdl.TRIGGERS[name], state)
                for captured, share in ((True, calls), (False, eager_calls)):
                    if share:
                        done, wrong = burst.run(max(share // len(kinds), SLOTS), captured)
                        found.append(Stressed(consumer, count, hidden, name, captured, done, wrong))
    finally:
        state.limit_to(before)
    return found


class _Burst:
    """New data for all slots, one call for each in a row, and a comparison of each."""

    def __init__(self, call: Call, tokens: int, hidden: int, trigger: Trigger, state: GroupState) -> None:
        self.call, self.trigger, self.state = call, trigger, state
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.counter, self.wrong = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
        self.slots = [self._slot(tokens, hidden) for _ in range(SLOTS)]
        self.poisoned = [(slot.norm, slot.total, slot.seen) for slot in self.slots]
        most = domain.max_capacity(self.ranks)
        self.strategies = [Limits(most, most, "one-shot")]
        if tokens > self.ranks:
            self.strategies.append(Limits(0, most, "two-shot"))

    def _slot(self, tokens: int, hidden: int) -> Slot:
        x, residual, norm, total = (torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda") for _ in range(4))
        return Slot(x, residual, norm, total, torch.empty(tokens, hidden, device="cuda"))

    def once(self) -> None:
        """One burst on the current stream."""
        from fusion_passes.bench import pdl_kernels

        for index, slot in enumerate(self.slots):
            pdl_kernels.refill(self.counter, index, self.rank, slot.x, slot.residual, self.poisoned[index])
        for index, slot in enumerate(self.slots):
            self.state.limit_to(self.strategies[index % len(self.strategies)])
            self.call(slot, self.trigger)
        for index, slot in enumerate(self.slots):
            seen = (slot.norm, slot.total, slot.seen)
            pdl_kernels.count_wrong(self.counter, index, self.ranks, EPS, *seen, self.wrong)
        self.counter += 1

    def run(self, calls: int, captured: bool) -> tuple[int, int]:
        """(calls made, wrong values), once everything has ended."""
        bursts, step = -(-calls // SLOTS), self.once
        self.once()
        self.wrong.zero_()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.once()
            step = graph.replay
        dist.barrier()
        for _ in range(bursts):
            step()
        wrong = self.wrong.clone()
        dist.all_reduce(wrong)
        return bursts * SLOTS, int(wrong.item())
