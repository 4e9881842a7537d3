"""What may happen to a sum on its way to the norm: tensors added to it, numbers that it is multiplied by.

Such steps are linear, so they can be applied before the collective instead: a factor to this rank's contribution, an
added tensor to what the op takes as residual. Values that follow an all-reduce are the same on all ranks; a factor is
held to be, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fusion_passes.patterns import CAST, bind, same_shape, value

aten = torch.ops.aten

Operand = Node | float


@dataclass(frozen=True)
class Step:
    """One operation between a sum and its norm.

    Attributes:
        node: its result.
        before: what it takes from the sum.
        operator: the operator; not the node itself where it works in float32 and the result is cast back.
        through: the operand of the operator that comes from the sum: before, or its cast to float32.
    """

    node: Node
    before: Node
    operator: Node
    through: Node

    @property
    def first(self) -> Node:
        """The node that uses what comes from the sum."""
        return self.operator if self.through is self.before else self.through

    @property
    def operand(self) -> Operand:
        """What is added or multiplied; read from the graph, where an earlier rewrite may have replaced it.

        The product in an addmm has no node of its own: the addmm stands for it, which has its type and shape.
        """
        if self.product:
            return self.operator
        found = _other(self.operator, self.through)
        if self.through is not self.before:
            assert isinstance(found, Node)
            (found, _), *_ = bind(found)
        return found  # type: ignore[no-any-return]

    @property
    def product(self) -> tuple[Node, Node] | None:
        """The matrices whose product is added, where Inductor has made one operator of product and addition."""
        if self.operator.target is not aten.addmm.default:
            return None
        _, (a, _), (b, _), *_ = bind(self.operator)
        return a, b

    @property
    def adds(self) -> bool:
        """Whether the step adds a tensor; otherwise it scales."""
        return self.operator.target in (aten.add.Tensor, aten.addmm.default)

    @property
    def does_nothing(self) -> bool:
        """Whether the step scales by one, as models with an unused multiplier do."""
        return not self.adds and self.operand == 1


def recognise(user: Node, before: Node) -> Step | None:
    """The step that a user of a sum begins, or None; type and shape of the sum stay as they are."""
    found = _in_float32(user, before) if user.target is CAST else _plain(user, before)
    if found is None:
        return None
    mine, result = value(before), value(found.node)
    same = mine is not None and result is not None and mine.dtype == result.dtype and same_shape(mine, result)
    return found if same else None


def _plain(user: Node, before: Node) -> Step | None:
    check = _KINDS.get(user.target)
    if check is None:
        return None
    other = user if user.target is aten.addmm.default else _other(user, before)
    return Step(user, before, user, before) if other is not before and check(user, before, other) else None


def _in_float32(cast: Node, before: Node) -> Step | None:
    """An addition of two tensors that are cast to float32 and back, which rounds as one in their own type does."""
    add = _only_user(cast)
    back = _only_user(add) if add is not None and add.target is aten.add.Tensor else None
    if add is None or back is None or back.target is not CAST or cast.args[1] is not torch.float32:
        return None
    other = _other(add, cast)
    if not isinstance(other, Node) or other is cast or other.target is not CAST:
        return None
    (source, _), *_ = bind(other)
    (*_, (alpha, _)) = bind(add)
    mine, its = value(before), value(source)
    return Step(back, before, add, cast) if alpha == 1 and mine is not None and _same_type(mine, its) else None


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other(operator: Node, operand: Node) -> Any:
    (left, _), (right, _), *_ = bind(operator)
    return right if left is operand else left


def _same_type(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return b is not None and a.dtype == b.dtype


def are_exact(steps: Sequence[Step]) -> bool:
    """Whether the fused op rounds where the steps do: one tensor is added at most, and nothing scales."""
    single = sum(step.adds for step in steps) <= 1
    return single and all((step.adds and not step.product) or step.does_nothing for step in steps)


def _is_addition(node: Node, before: Node, other: object) -> bool:
    found, mine = value(other) if isinstance(other, Node) else None, value(before)
    (*_, (alpha, _)) = bind(node)
    return alpha == 1 and mine is not None and _same_type(mine, found)


def _is_factor(node: Node, before: Node, other: object) -> bool:
    if isinstance(other, Node):
        found = value(other)
        return found is not None and found.dim() == 0
    return isinstance(other, (int, float))


def _is_added_to_product(node: Node, before: Node, other: object) -> bool:
    (added, _), (a, _), (b, _), (beta, _), (alpha, _) = bind(node)
    return added is before and before not in (a, b) and alpha == beta == 1


def _is_divisor(node: Node, before: Node, other: object) -> bool:
    return node.args[0] is before and _is_factor(node, before, other)


_KINDS: dict[object, Callable[[Node, Node, object], bool]] = {
    aten.add.Tensor: _is_addition,
    aten.mul.Tensor: _is_factor,
    aten.div.Tensor: _is_divisor,
    aten.addmm.default: _is_added_to_product,
}
