"""The one check that every site passes, whatever its rule: a table of questions, the first no is the reason.

Every answer rests on the graph, the configuration, and facts that are equal on all ranks. What is not known at compile
time, such as a symbolic size, is no reason: the op decides it at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch.fx import Node

from custom_ops import domain, limits
from fusion_passes.collectives import AllReduce
from fusion_passes.config import FusionConfig
from fusion_passes.environment import Environment
from fusion_passes.patterns import same_shape, value
from fusion_passes.reasons import NotFused
from fusion_passes.sites import Site, Surroundings
from fusion_passes.steps import Step


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


@dataclass(frozen=True)
class Question(CollectiveQuestion):
    """What a check of a site sees besides: the whole site, and the rest of the graph."""

    site: Site
    around: Surroundings

    @cached_property
    def weight(self) -> torch.Tensor | None:
        """The weight of the norm."""
        return None if self.site.norm.weight is None else value(self.site.norm.weight)


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


def _residual_mismatch(q: Question) -> str | None:
    total = value(q.site.total)
    for node in (*q.site.addends, q.site.norm.x):
        other = value(node)
        if other is not None and (other.dtype != q.x.dtype or other.device != q.x.device):
            return f"{node} is {other.dtype} on {other.device}, the sum {q.x.dtype} on {q.x.device}"
    result = value(q.site.all_reduce.result)
    if total is None or result is None or result.dtype != q.x.dtype or not same_shape(result, q.x):
        return f"{q.site.all_reduce.result} does not look like its input"
    return None


def _weight_mismatch(q: Question) -> str | None:
    weight = q.weight
    if weight is None or (weight.dtype == q.x.dtype and weight.device == q.x.device):
        return None
    return f"weight of {weight.dtype} on {weight.device}, activations of {q.x.dtype} on {q.x.device}"


def _weight_depends(q: Question) -> str | None:
    for node in (q.site.norm.weight, q.site.norm.eps):
        if isinstance(node, Node) and q.around.depends_on_all_reduce(node):
            return f"{node} depends on an all-reduce, so it may not be there when the kernel starts"
    return None


def _eps(q: Question) -> str | None:
    eps = q.site.norm.eps
    if isinstance(eps, Node):
        found = value(eps)
        on_host = found is not None and found.device.type == "cpu"
        return None if on_host else f"epsilon is {eps} on a device; reading it would wait for the device"
    return None if math.isfinite(eps) else f"epsilon is {eps}"


def _rounding(q: Question) -> str | None:
    if not (q.config.exact_rounding and q.site.norm.rounds_before_weight):
        return None
    return "the norm is rounded before its weight; the kernel rounds after it, and exact_rounding is set"


def _scale_between(q: Question) -> str | None:
    if not q.site.factors:
        return None
    shown = ", ".join(map(str, q.site.factors))
    if q.x.dtype == torch.float16:
        return f"the sum is multiplied by {shown}; applied before the sum, that may overflow float16"
    return None if _may_reassociate(q) else f"the sum is multiplied by {shown}; {_ORDER}"


def _bias_between(q: Question) -> str | None:
    addends = q.site.addends
    biases = [node for node in addends if (found := value(node)) is not None and found.dim() <= 1]
    if not biases or len(addends) == 1 or _may_reassociate(q):
        return None
    return f"{biases[0]} is added to the sum before the residual; {_ORDER}"


def _sum_of_sums(q: Question) -> str | None:
    product = next((step.node for step in q.site.steps if step.product), None)
    if (len(q.site.addends) <= 1 and product is None) or _may_reassociate(q):
        return None
    return f"{product or q.site.addends[0]} is added to the sum before the residual is; {_ORDER}"


def _may_reassociate(q: Question) -> bool:
    return q.config.reassociate and not q.config.exact_rounding


_ORDER = "the fused op would take that first, and reassociate is off or exact_rounding on"


def _reshaped(q: Question) -> str | None:
    """Where nothing has the shape of the total, that of the contribution must do; what is reshaped must be whole."""
    total = value(q.site.total)
    assert total is not None
    shaped = any(same_shape(found, total) for node in q.site.addends if (found := value(node)) is not None)
    if q.site.steps and not shaped and not same_shape(total, q.x):
        return f"the sum of shape {list(q.x.shape)} is scaled or shifted as {list(total.shape)}"
    for step, after in pairwise(q.site.steps):
        if after.before is not step.node and step.adds and not _is_whole(step):
            return f"{step.operand}, added to the sum before it is reshaped to {after.before}, has another shape"
    return None


def _is_whole(step: Step) -> bool:
    """Whether what a step adds has the shape of the sum, or is a bias."""
    mine, its = value(step.before), value(step.operand) if isinstance(step.operand, Node) else None
    return mine is not None and its is not None and (its.dim() <= 1 or same_shape(mine, its))


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
    return f"{tokens} tokens are {size} bytes, fusion pays up to {found.two_shot_bytes} ({found.source})"


def _static_tokens(x: torch.Tensor) -> int:
    """Rows of a tensor; 0 where they are not known at compile time."""
    tokens = math.prod(x.shape[:-1])
    return tokens if isinstance(tokens, int) else 0


_BEFORE: tuple[tuple[str, Callable[[CollectiveQuestion], str | None]], ...] = (
    ("reduce_op", _reduce_op),
    ("group_not_static", _group_not_static),
    ("group_unknown", _group_unknown),
    ("single_rank", _single_rank),
    ("dtype", _dtype),
)
_AFTER: tuple[tuple[str, Callable[[CollectiveQuestion], str | None]], ...] = (
    ("device", _device),
    ("flashinfer", _flashinfer),
    ("kernel_domain", _kernel_domain),
    ("max_token_num", _max_token_num),
    ("above_limit", _above_limit),
)
COLLECTIVE_CHECKS = (*_BEFORE, *_AFTER)
"""Every check of a collective with its code, in the order in which they are asked."""

CHECKS: tuple[tuple[str, Callable[[Question], str | None]], ...] = (
    *_BEFORE,
    ("residual_mismatch", _residual_mismatch),
    ("weight_mismatch", _weight_mismatch),
    ("weight_depends", _weight_depends),
    ("eps", _eps),
    ("rounding", _rounding),
    ("scale_between", _scale_between),
    ("bias_between", _bias_between),
    ("sum_of_sums", _sum_of_sums),
    ("reshaped", _reshaped),
    *_AFTER,
)
"""Every check of a site with its code, in the order in which they are asked."""


def refusal(question: Question) -> NotFused | None:
    """The first reason against fusing a site; None if there is none."""
    for code, check in CHECKS:
        if text := check(question):
            return NotFused(code, text)
    return None


def collective_refusal(question: CollectiveQuestion) -> NotFused | None:
    """The first reason against serving a collective by FlashInfer; None if there is none."""
    for code, check in COLLECTIVE_CHECKS:
        if text := check(question):
            return NotFused(code, text)
    return None
