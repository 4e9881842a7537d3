"""Which quantisation of a norm the op takes over: the one that most consumers share, if nothing speaks against it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch.fx import Node

from custom_ops import backends, domain, pattern_codes
from fusion_passes import quants, reasons, scales
from fusion_passes.eligibility import Question
from fusion_passes.patterns import value
from fusion_passes.quants import Choice, Quant
from fusion_passes.reasons import NotFused
from fusion_passes.sites import views_of


def choose(question: Question) -> tuple[Choice | None, NotFused | None]:
    """(what the op quantises, why a quantisation was left to Inductor); None where there is none."""
    if not question.config.fuse_quantisation:
        return None, None
    norm = question.site.norm.out
    found = list(quants.find(norm, views_of(norm)))
    groups: dict[tuple[object, ...], list[Quant]] = defaultdict(list)
    for quant in found:
        if isinstance(quant, Quant):
            groups[quant.key].append(quant)
    refused = [quant for quant in found if isinstance(quant, NotFused)]
    for group in sorted(groups.values(), key=len, reverse=True):
        if reason := next(filter(None, (_refusal(question, quant) for quant in group)), None):
            refused.append(reason)
            continue
        return Choice(tuple(group), _is_used(norm, group)), next(iter(refused), None)
    return None, next(iter(refused), None)


def _is_used(norm: Node, group: list[Quant]) -> bool:
    """Whether anything uses the norm once the quantisations are gone."""
    replaced = {node for quant in group for node in quant.replaced}
    inner = {node for quant in group for node in quant.nodes} | set(views_of(norm))

    def is_gone(node: Node) -> bool:
        # Sizes can be asked of other outputs.
        asked = node in replaced or node.target is torch.ops.aten.sym_size.int
        return asked or (node in inner and all(is_gone(user) for user in node.users))

    return not is_gone(norm)


def _rounding(q: Question, quant: Quant) -> str | None:
    if (quant.exact and not q.site.norm.wide) or not q.config.exact_rounding:
        return None
    return f"{quant.values} rounds elsewhere than the kernel ({quant.form}), and exact_rounding is set"


def _scale_tensor(q: Question, quant: Quant) -> str | None:
    source = None if quant.scale is None else quant.scale.source
    found = value(source) if isinstance(source, Node) else None
    if found is None or (scales.is_one(source) and found.device == q.x.device and found.dtype.is_floating_point):
        return None
    shown = f"{list(found.shape)} of {found.dtype} on {found.device}"
    return f"the scale {source} is {shown}; the kernel reads one number on {q.x.device}"


def _scale_depends(q: Question, quant: Quant) -> str | None:
    source = None if quant.scale is None else quant.scale.source
    if not isinstance(source, Node) or not q.around.depends_on_all_reduce(source):
        return None
    return f"the scale {source} depends on an all-reduce; the kernel needs it before the norm is there"


def _domain(q: Question, quant: Quant) -> str | None:
    hidden = q.x.shape[-1]
    if not isinstance(hidden, int):
        return f"hidden size {hidden} is not known at compile time"
    pattern = pattern_codes.find(quant.quantisation.format.name, norm_out=False)
    if pattern.code not in backends.find(q.config.backend).patterns:
        return f"FlashInfer's backend {q.config.backend!r} has no pattern for {quant.quantisation.format.title}"
    # On CPUs the reference serves all shapes; world size 2 is one that the kernel serves too.
    size = 2 if q.x.device.type == "cpu" else q.world_size
    return domain.shape_refusal(hidden, q.x.dtype, size, quant.quantisation)


def _device(q: Question, quant: Quant) -> str | None:
    return q.environment.quantisation_refusal(q.x.device, quant.quantisation)


CHECKS: tuple[tuple[str, Callable[[Question, Quant], str | None]], ...] = (
    ("quant_rounding", _rounding),
    ("quant_scale", _scale_tensor),
    ("quant_scale_depends", _scale_depends),
    ("quant_domain", _domain),
    ("quant_device", _device),
)
"""Every check with its code, in the order in which they are asked."""


def _refusal(question: Question, quant: Quant) -> NotFused | None:
    return reasons.first(CHECKS, question, quant)
