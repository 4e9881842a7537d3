"""A process group in one process whose sum is its input times a number, so that a lost or doubled reduction shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllreduceOptions, _create_work_from_future
from torch.distributed.distributed_c10d import _world
from torch.futures import Future

FACTORS = (2.0, 3.0)
"""What the groups multiply by, in the order in which they are made."""


class ScalingGroup(dist.ProcessGroup):
    """All other ranks contribute the same multiple of what this one does; averages leave it as it is."""

    def __init__(self, rank: int, size: int, factor: float) -> None:
        super().__init__(rank, size)
        self.factor = factor

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions | None = None) -> Any:
        """Multiply in place."""
        average = options is not None and options.reduceOp == dist.ReduceOp.AVG
        for tensor in tensors:
            tensor.mul_(1.0 if average else self.factor)
        return _done(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any = None) -> Any:
        """What the two ranks hold: the input, and what makes up the rest of the sum."""
        for (mine, other), tensor in zip(outputs, inputs, strict=True):
            mine.copy_(tensor)
            other.copy_(tensor * (self.factor - 1))
        return _done(outputs)

    @property
    def group_name(self) -> str:
        """Name in torch's registry."""
        return str(_world.pg_names[self])

    def getBackendName(self) -> str:
        """Name by which it is registered."""
        return "scaling"


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


@contextmanager
def groups() -> Iterator[list[str]]:
    """Names of process groups of two ranks each, one per factor."""
    left = iter(FACTORS)
    dist.Backend.register_backend(
        "scaling", lambda store, rank, size, timeout: ScalingGroup(rank, size, next(left)), devices=["cpu"]
    )
    dist.init_process_group("scaling", store=dist.HashStore(), rank=0, world_size=2)
    try:
        made = [dist.group.WORLD, *(dist.new_group([0, 1], backend="scaling") for _ in FACTORS[1:])]
        yield [group.group_name for group in made if group is not None]
    finally:
        dist.destroy_process_group()
        dist.Backend.backend_list.remove("scaling")
