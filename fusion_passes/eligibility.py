"""The one check that every site passes, whatever its rule: a table of questions, the first no is the reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch.fx import Node

from fusion_passes import collective_checks, reasons
from fusion_passes.collective_checks import CollectiveQuestion
from fusion_passes.patterns import same_shape, value
from fusion_passes.reasons import NotFused
from fusion_passes.sites import Site, Surroundings
from fusion_passes.steps import Step


@dataclass(frozen=True)
class Question(CollectiveQuestion):
    """What a check of a site sees besides: the whole site, and the rest of the graph."""

    site: Site
    around: Surroundings

    @cached_property
    def weight(self) -> torch.Tensor | None:
        """The weight of the norm."""
        return None if self.site.norm.weight is None else value(self.site.norm.weight)


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


CHECKS: tuple[tuple[str, Callable[[Question], str | None]], ...] = (
    *collective_checks.FIRST,
    ("residual_mismatch", _residual_mismatch),
    ("weight_mismatch", _weight_mismatch),
    ("weight_depends", _weight_depends),
    ("eps", _eps),
    ("rounding", _rounding),
    ("scale_between", _scale_between),
    ("bias_between", _bias_between),
    ("sum_of_sums", _sum_of_sums),
    ("reshaped", _reshaped),
    *collective_checks.LAST,
)
"""Every check of a site with its code, in the order in which they are asked."""


def refusal(question: Question) -> NotFused | None:
    """The first reason against fusing a site; None if there is none."""
    return reasons.first(CHECKS, question)
