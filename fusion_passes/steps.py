"""What may happen to a sum on its way to the norm: tensors added to it, numbers that it is multiplied by.

Such steps are linear, so they can be applied before the collective instead: a factor to this rank's contribution, an
added tensor to what the op takes as residual. Values that follow an all-reduce are the same on all ranks; a factor is
held to be, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from fusion_passes.patterns import bind, same_shape, value

aten = torch.ops.aten

Operand = Node | float


@dataclass(frozen=True)
class Step:
    """One operator between a sum and its norm.

    Attributes:
        node: the operator.
        before: its operand that comes from the sum.
    """

    node: Node
    before: Node

    @property
    def operand(self) -> Operand:
        """What is added or multiplied; read from the graph, where an earlier rewrite may have replaced it."""
        (left, _), (right, _), *_ = bind(self.node)
        found: Operand = right if left is self.before else left
        return found

    @property
    def adds(self) -> bool:
        """Whether the step adds a tensor; otherwise it scales."""
        return self.node.target is aten.add.Tensor

    @property
    def does_nothing(self) -> bool:
        """Whether the step scales by one, as models with an unused multiplier do."""
        return not self.adds and self.operand == 1


def recognise(node: Node, before: Node) -> Step | None:
    """The step that an operator takes from a sum, or None; type and shape of the sum stay as they are."""
    check = _KINDS.get(node.target)
    mine, result = value(before), value(node)
    if check is None or mine is None or result is None or mine.dtype != result.dtype or not same_shape(mine, result):
        return None
    (left, _), (right, _), *_ = bind(node)
    other = right if left is before else left
    return Step(node, before) if other is not before and check(node, before, other) else None


def are_exact(steps: Sequence[Step]) -> bool:
    """Whether the fused op rounds where the steps do: one tensor is added at most, and nothing scales."""
    return sum(step.adds for step in steps) <= 1 and all(step.adds or step.does_nothing for step in steps)


def _is_addition(node: Node, before: Node, other: object) -> bool:
    found, mine = value(other) if isinstance(other, Node) else None, value(before)
    (*_, (alpha, _)) = bind(node)
    return alpha == 1 and found is not None and mine is not None and found.dtype == mine.dtype


def _is_factor(node: Node, before: Node, other: object) -> bool:
    if isinstance(other, Node):
        found = value(other)
        return found is not None and found.dim() == 0
    return isinstance(other, (int, float))


def _is_divisor(node: Node, before: Node, other: object) -> bool:
    return node.args[0] is before and _is_factor(node, before, other)


_KINDS: dict[object, Callable[[Node, Node, object], bool]] = {
    aten.add.Tensor: _is_addition,
    aten.mul.Tensor: _is_factor,
    aten.div.Tensor: _is_divisor,
}
