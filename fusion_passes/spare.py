"""Which tensors of a graph may be written over: an all-reduce in place needs no copy, as NCCL's needs none in stock."""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fusion_passes.patterns import is_contiguous, value

aten = torch.ops.aten

PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_mm.default,
    aten.sum.dim_IntList,
}
"""Operators that write memory of their own, besides the pointwise ones."""

VIEWS = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}


def is_spare(node: Node, user: Node) -> bool:
    """Whether a contiguous tensor was made in this graph and nothing but one user, directly or by views, reads it."""
    found = value(node)
    if found is None or not is_contiguous(found):
        return False
    while set(node.users) <= {user} and node.target in VIEWS:
        source = node.args[0]
        assert isinstance(source, Node)
        user, node = node, source
    return set(node.users) <= {user} and _is_fresh(node.target)


def _is_fresh(target: object) -> bool:
    """Whether an operator's result is memory of its own; a clone may yet be left out."""
    if target in PRODUCTS:
        return True
    if not isinstance(target, OpOverload) or target is aten.clone.default:
        return False
    owns = all(result.alias_info is None for result in target._schema.returns)
    return owns and torch.Tag.pointwise in target.tags


def is_sized(tensor: torch.Tensor) -> bool:
    """Whether every size of a tensor is known at compile time."""
    return not tensor._has_symbolic_sizes_strides
