"""What stands between an all-reduce and a norm, in words: asked only when no site was found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fusion_passes.norms import Norm
from fusion_passes.patterns import CAST, value
from fusion_passes.reasons import NotFused

aten = torch.ops.aten

_NORM_PARTS = {aten.mean.dim, aten.var_mean.correction, aten.native_layer_norm.default, aten.rsqrt.default}
_PASSED = {CAST, aten.reshape.default, aten.sum.dim_IntList, aten.addmm.default}
_REACH = 32
"""Nodes looked at in search of a norm of unknown form."""


@dataclass(frozen=True)
class Blocker:
    """A step that keeps a sum from its norm."""

    code: str
    applies: Callable[[Node], bool]
    text: str


def _is_scale(user: Node) -> bool:
    tensors = [found for arg in user.all_input_nodes if (found := value(arg)) is not None and found.dim() > 0]
    return user.target is aten.mul.Tensor and len(tensors) > 1


def _is_cast_to_add(user: Node) -> bool:
    return user.target is CAST and any(after.target is aten.add.Tensor for after in user.users)


def _is_mixed_add(user: Node) -> bool:
    dtypes = {found.dtype for arg in user.all_input_nodes if (found := value(arg)) is not None}
    return user.target is aten.add.Tensor and len(dtypes) > 1


BLOCKERS = (
    Blocker("cast_between", _is_cast_to_add, "casts the sum before it is added"),
    Blocker("residual_mismatch", _is_mixed_add, "adds the sum to a tensor of another type"),
    Blocker("scale_between", _is_scale, "multiplies the sum by a tensor"),
)
"""Every known blocker, most specific first."""


def explain(views: list[Node], norms: Mapping[Node, list[Norm]]) -> NotFused:
    """Why no norm was reached from a sum.

    Args:
        views: the sum and its reshapes.
        norms: the graph's norms by their input.
    """
    users = [user for view in views for user in view.users if user not in views]
    for blocker in BLOCKERS:
        for user in users:
            if blocker.applies(user):
                return NotFused(blocker.code, f"{_show(user)} {blocker.text}")
    part = _norm_part_near(users)
    if part and (norm := next((norm for found in norms.values() for norm in found if part in norm.nodes), None)):
        text = (
            f"{users[0]}, between the sum and the norm {norm.out}, is no known step, changes rows or is used elsewhere"
        )
        return NotFused("other_between", text)
    if part:
        return NotFused("norm_not_recognised", f"{_show(part)} belongs to no known form of RMSNorm in float32")
    if last := _returned(users):
        way = "compile the whole model, or the loop over its layers, as one graph"
        return NotFused("graph_ends", f"the graph returns {last} and ends before a norm; {way}")
    found = ", ".join(_show(user) for user in users[:3]) or "nothing"
    return NotFused("no_norm", f"the sum goes to {found}, and no norm of it is in this graph")


def _returned(users: list[Node]) -> str | None:
    """The sum, or what a tensor is added to it in, if the graph returns it."""
    if any(user.op == "output" for user in users):
        return "the sum"
    adds = [user for user in users if user.target is aten.add.Tensor]
    return next((_show(add) for add in adds if any(user.op == "output" for user in add.users)), None)


def _norm_part_near(users: list[Node]) -> Node | None:
    """Part of a norm that is reached from users through elementwise operators and sums alone."""
    frontier = list(dict.fromkeys(users))
    for node in frontier:
        if node.target in _NORM_PARTS:
            return node
        if len(frontier) < _REACH and _is_passed(node):
            frontier += [user for user in node.users if user not in frontier and not _is_factor_of(node, user)]
    return None


def _is_factor_of(node: Node, product: Node) -> bool:
    """Whether a node is multiplied in a matrix product, and not added to one."""
    return product.target is aten.addmm.default and node in product.args[1:]


def _is_passed(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in _PASSED


def _show(node: Node) -> str:
    return f"{node} ({node.target})"
