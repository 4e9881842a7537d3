"""From an all-reduce to the norm that follows it: the site of a fusion, or why there is none. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fusion_passes import collectives, diagnosis, norms
from fusion_passes.collectives import AllReduce
from fusion_passes.norms import Norm
from fusion_passes.patterns import bind, same_shape, same_size, value
from fusion_passes.reasons import NotFused

aten = torch.ops.aten


@dataclass(frozen=True)
class Site:
    """An all-reduce, the residual added to its sum if any, and the norm of that.

    Attributes:
        all_reduce: the collective.
        addend: the sum, or the view of it that is added to a residual; None where nothing is added.
        total: the node that stands for the new residual: the add, or the sum.
        norm: the norm of total, or of a view of it.
    """

    all_reduce: AllReduce
    addend: Node | None
    total: Node
    norm: Norm

    @property
    def residual(self) -> Node | None:
        """What is added to the sum; read from the graph, where an earlier rewrite may have replaced it."""
        if self.addend is None:
            return None
        (left, _), (right, _), _ = bind(self.total)
        found = right if left is self.addend else left
        assert isinstance(found, Node)
        return found


class Surroundings:
    """What one graph offers to its all-reduces.

    Attributes:
        norms: norms by their input.
    """

    def __init__(self, graph: Graph) -> None:
        self.norms = norms.find(graph)
        self._independent: set[Node] = set()

    def depends_on_all_reduce(self, node: Node) -> bool:
        """Whether a node is computed from the result of any all-reduce."""
        pending, seen = [node], {node}
        for node in pending:
            if node.target in collectives.TARGETS:
                return True
            new = [arg for arg in node.all_input_nodes if arg not in seen and arg not in self._independent]
            seen.update(new)
            pending += new
        self._independent |= seen
        return False


def assemble(all_reduce: AllReduce, around: Surroundings, claimed: set[Node]) -> Site | NotFused:
    """The site of an all-reduce.

    Args:
        all_reduce: where to begin.
        around: the graph's norms.
        claimed: totals that already belong to a site.
    """
    views = views_of(all_reduce.result)
    if norm := _norm_of(views, around):
        return Site(all_reduce, None, all_reduce.result, norm)
    for view in views:
        for add in view.users:
            norm, residual = _norm_of(views_of(add), around), other_addend(add, view)
            if norm is None or residual is None or residual in views:
                continue
            if add in claimed:
                return NotFused("norm_shared", f"a later all-reduce, also added in {add}, takes the norm {norm.out}")
            if use := _other_use(views, add):
                return NotFused("sum_used", f"besides {add}, {use} uses the sum, which no output of the kernel holds")
            return Site(all_reduce, view, add, norm)
    return diagnosis.explain(views, around.norms)


def views_of(node: Node) -> list[Node]:
    """A node and its reshapes that keep the last dimension, reshapes of reshapes included."""
    found = [node]
    for view in found:
        found += [user for user in view.users if user.target is aten.reshape.default and _same_rows(user, view)]
    return found


def other_addend(node: Node, addend: Node) -> Node | None:
    """The tensor that a node adds to addend; None unless both and the result have one shape and type."""
    if node.target is not aten.add.Tensor:
        return None
    (left, _), (right, _), (alpha, _) = bind(node)
    other = right if left is addend else left
    if alpha != 1 or other is addend or not isinstance(other, Node):
        return None
    mine, its, result = value(addend), value(other), value(node)
    if mine is None or its is None or result is None or not mine.dtype == its.dtype == result.dtype:
        return None
    return other if same_shape(mine, its) and same_shape(mine, result) else None


def _same_rows(node: Node, other: Node) -> bool:
    """Whether two tensors have rows of one length."""
    a, b = value(node), value(other)
    return a is not None and b is not None and bool(a.dim() and b.dim()) and same_size(a.shape[-1], b.shape[-1])


def _norm_of(views: list[Node], around: Surroundings) -> Norm | None:
    return next((norm for view in views for norm in around.norms.get(view, ())), None)


def _other_use(views: list[Node], add: Node) -> Node | None:
    return next((user for view in views for user in view.users if user is not add and user not in views), None)
