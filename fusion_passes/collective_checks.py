"""What must hold for FlashInfer to serve a collective, whatever follows: tables of questions; the first no counts.

Every answer rests on the graph, the configuration, and facts that are equal on all ranks. What is not known at compile
time, such as a symbolic size, is no reason: the op decides it at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from custom_ops import domain, limits
from fusion_passes import reasons
from fusion_passes.collectives import AllReduce
from fusion_passes.config import FusionConfig
from fusion_passes.environment import Environment
from fusion_passes.patterns import value
from fusion_passes.reasons import NotFused


@dataclass(frozen=True)
class CollectiveQuestion:
    """What a check of a collective sees: its tensor, and where it will run."""

    all_reduce: AllReduce
    config: FusionConfig
    environment: Environment

    @cached_property
    def x(self) -> torch.Tensor:
        """The contribution of this rank."""
        found = value(self.all_reduce.input)
        assert found is not None
        return found

    @cached_property
    def world_size(self) -> int:
        """Ranks of the group; 0 where it is unknown."""
        return self.environment.world_size(self.all_reduce.group)


def _reduce_op(q: CollectiveQuestion) -> str | None:
    op = q.all_reduce.reduce_op
    return None if op == "sum" else f"the reduction is {op!r}; the kernel sums"


def _group_not_static(q: CollectiveQuestion) -> str | None:
    group = q.all_reduce.group
    return None if isinstance(group, str) else f"the process group is {group!r}, not a name"


def _group_unknown(q: CollectiveQuestion) -> str | None:
    return None if q.world_size else f"process group {q.all_reduce.group!r} does not exist on this rank"


def _single_rank(q: CollectiveQuestion) -> str | None:
    return None if q.world_size != 1 else f"process group {q.all_reduce.group!r} has one rank; nothing to reduce"


def _dtype(q: CollectiveQuestion) -> str | None:
    allowed = ", ".join(map(str, domain.DTYPES))
    return None if q.x.dtype in domain.DTYPES else f"activations of {q.x.dtype}; the kernel serves {allowed}"


def _device(q: CollectiveQuestion) -> str | None:
    return q.environment.device_refusal(q.x.device)


def _flashinfer(q: CollectiveQuestion) -> str | None:
    return q.environment.flashinfer_refusal(q.x.device)


def _kernel_domain(q: CollectiveQuestion) -> str | None:
    hidden = q.x.shape[-1]
    if q.x.device.type == "cpu" or not isinstance(hidden, int):
        return None
    return domain.shape_refusal(hidden, q.x.dtype, q.world_size)


def _max_token_num(q: CollectiveQuestion) -> str | None:
    tokens, most = _static_tokens(q.x), q.config.max_token_num
    return f"{tokens} tokens, max_token_num is {most}" if most is not None and tokens > most else None


def _above_limit(q: CollectiveQuestion) -> str | None:
    tokens, hidden = _static_tokens(q.x), q.x.shape[-1]
    found = q.environment.limits(q.x.device, q.world_size)
    if found is None or not tokens or not isinstance(hidden, int):
        return None
    strategy = limits.choose(found, tokens, hidden, q.x.dtype.itemsize, q.world_size)
    if strategy is not limits.Strategy.UNFUSED:
        return None
    size = tokens * hidden * q.x.dtype.itemsize
    return f"{tokens} tokens are {size} bytes, fusion pays up to {found.at(hidden).two_shot_bytes} ({found.source})"


def overlap_is_faster(q: CollectiveQuestion) -> NotFused | None:
    """Why an all-reduce that could be fused is better served alone; None where it is not, or its size is not known."""
    tokens, hidden = _static_tokens(q.x), q.x.shape[-1]
    found = q.environment.limits(q.x.device, q.world_size)
    if found is None or not tokens or not isinstance(hidden, int):
        return None
    size, most = tokens * hidden * q.x.dtype.itemsize, found.at(hidden).overlap_bytes
    if size > most:
        return None
    text = f"{size} bytes; up to {most} the all-reduce alone is faster ({found.source})"
    return NotFused("overlap_faster", text)


def _static_tokens(x: torch.Tensor) -> int:
    """Rows of a tensor; 0 where they are not known at compile time."""
    tokens = math.prod(x.shape[:-1])
    return tokens if isinstance(tokens, int) else 0


FIRST: tuple[tuple[str, Callable[[CollectiveQuestion], str | None]], ...] = (
    ("reduce_op", _reduce_op),
    ("group_not_static", _group_not_static),
    ("group_unknown", _group_unknown),
    ("single_rank", _single_rank),
    ("dtype", _dtype),
)
"""Asked before what concerns the rest of a site."""

LAST: tuple[tuple[str, Callable[[CollectiveQuestion], str | None]], ...] = (
    ("device", _device),
    ("flashinfer", _flashinfer),
    ("kernel_domain", _kernel_domain),
    ("max_token_num", _max_token_num),
    ("above_limit", _above_limit),
)
"""Asked after it."""


def refusal(question: CollectiveQuestion) -> NotFused | None:
    """The first reason against serving a collective by FlashInfer; None if there is none."""
    return reasons.first((*FIRST, *LAST), question)
