"""Where the scale of a quantisation comes from: given with the model, or the largest magnitude of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.pattern_matcher import KeywordArg, Match, is_match
from torch.fx import Node

from custom_ops.reference_quant import FLOAT8_MAX
from fusion_passes.patterns import CAST, OneOf, Op, either_order, same_size, value
from fusion_passes.reasons import NotFused

aten = torch.ops.aten


@dataclass(frozen=True)
class Scale:
    """A scale that is given.

    Attributes:
        source: a tensor of one element, or a number.
        inverted: whether the kernel's scale is its reciprocal.
    """

    source: Node | float
    inverted: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the kernel multiplies by what a product with the inverse of this multiplies by."""
        if isinstance(self.source, Node):
            return not self.inverted
        single = torch.tensor(self.source, dtype=torch.float32)
        return not self.inverted or bool(1 / (1 / single) == single)


@dataclass(frozen=True)
class RowScale:
    """A scale that is made of each row.

    Attributes:
        root: the node that holds the scales, one a row.
        nodes: all nodes that it was matched on, and reshapes of the root that lead to its use.
    """

    root: Node
    nodes: tuple[Node, ...]


_X = OneOf(Op(CAST, KeywordArg("x"), torch.float32), KeywordArg("x"))
_OWN_LARGEST = Op(aten.amax.default, Op(aten.abs.default, _X), KeywordArg("dims"), KeywordArg("keepdim"))
_LARGEST = OneOf(Op(CAST, _OWN_LARGEST, torch.float32), _OWN_LARGEST)
_GUARDED = OneOf(
    Op(aten.where.self, Op(aten.gt.Scalar, _LARGEST, 0), _LARGEST, KeywordArg("fallback")),
    Op(aten.clamp_min.default, _LARGEST, KeywordArg("floor")),
    _LARGEST,
)
_OVER_MAX = OneOf(
    Op(aten.div.Tensor, _GUARDED, FLOAT8_MAX), either_order(aten.mul.Tensor, _GUARDED, KeywordArg("times"))
)
_WIDE = OneOf(Op(CAST, _OVER_MAX, torch.float32), _OVER_MAX)
ROWS = OneOf(Op(aten.clamp_min.default, _WIDE, KeywordArg("least")), _WIDE)
"""Every spelling of a row's scale: |x| at most, guarded against zero or not, over 448, bounded from below or not."""

_VIEWS = {aten.unsqueeze.default, aten.reshape.default, aten.squeeze.dim}
_LARGEST_FLOOR = 1e-3
"""A scale that is bounded from below by more than this is no guard against zero but another quantisation."""


def of_rows(operand: Any, x: Node, inverted: bool) -> RowScale | None:
    """The scale of each row of x that an operand is, or (inverted) is the reciprocal of; None if it is none."""
    path: list[Node] = []
    if not _is_column(operand, x):
        return None
    while isinstance(operand, Node) and (operand.target in _VIEWS or (inverted and _is_reciprocal(operand))):
        inverted = inverted and not _is_reciprocal(operand)
        path.append(operand)
        operand = operand.args[0]
    if not isinstance(operand, Node) or inverted:
        return None
    match = ROWS.match(operand)
    if not is_match(match) or not _fits(match, operand, x):
        return None
    return RowScale(operand, (*match.nodes, *path))


def _is_column(operand: Any, x: Node) -> bool:
    """Whether an operand has one element for each row of x, where the row is."""
    mine, its = value(operand) if isinstance(operand, Node) else None, value(x)
    if mine is None or its is None or mine.dim() != its.dim():
        return False
    rows = zip(mine.shape[:-1], its.shape[:-1], strict=True)
    return same_size(mine.shape[-1], 1) and all(same_size(a, b) for a, b in rows)


def _is_reciprocal(node: Node) -> bool:
    return node.target is aten.reciprocal.default


def _fits(match: Match, root: Node, x: Node) -> bool:
    """What a pattern cannot say: the rows are those of x, the bounds are guards, and the scale is float32."""
    names, found, scales = match.kwargs, value(x), value(root)
    if found is None or scales is None or names["x"] is not x or scales.dtype != torch.float32:
        return False
    if list(names["dims"]) not in ([-1], [found.dim() - 1]):
        return False
    times = names.get("times", 1 / FLOAT8_MAX)
    floors = [names.get("least", 0.0), _over_max(names.get("floor", 0.0))]
    return _is_close(times, 1 / FLOAT8_MAX) and all(0 <= floor <= _LARGEST_FLOOR for floor in floors)


def _over_max(floor: Any) -> float:
    return floor / FLOAT8_MAX if isinstance(floor, (int, float)) else float("inf")


def _is_close(a: Any, b: float) -> bool:
    return isinstance(a, (int, float)) and abs(a - b) <= 1e-6 * b


def given(operand: Any, inverted: bool) -> Scale | NotFused:
    """The scale that an operand is, or (inverted) is the reciprocal of; or why the kernel cannot take it."""
    while isinstance(operand, Node) and inverted:
        inner = _reciprocal_of(operand)
        if inner is None:
            break
        operand, inverted = inner, False
    while isinstance(operand, Node) and operand.target is CAST and is_one(operand.args[0]):
        operand = operand.args[0]
    number = constant(operand)
    if number is not None:
        if not 0 < abs(number) < float("inf"):
            return NotFused("quant_scale", f"the scale is {number}")
        return Scale(number, inverted)
    if not is_one(operand):
        shape = list(found.shape) if isinstance(operand, Node) and (found := value(operand)) is not None else operand
        text = f"the scale {operand} has shape {shape}, and is not that of each row in a known form"
        return NotFused("quant_scale", text + hint(operand))
    return Scale(operand, inverted)


def hint(operand: Any) -> str:
    """What to do where a number that a form needs to know is an input of the graph."""
    near = [operand] if isinstance(operand, Node) else []
    for _ in range(3):
        near += [arg for node in near for arg in node.all_input_nodes if arg not in near]
    floats = [
        node for node in near if node.op == "placeholder" and (found := value(node)) is not None and _is_float(found)
    ]
    if not floats:
        return ""
    return f"; {floats[0]} is a Python float that dynamic=True made an input: set torch._dynamo.config.specialize_float"


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float64 and tensor.dim() == 0 and tensor.device.type == "cpu"


def _reciprocal_of(node: Node) -> Node | None:
    """x of a node that is 1 / x in one of its spellings."""
    if node.target is aten.mul.Tensor and node.args[1] == 1:
        node = node.args[0]  # type: ignore[assignment]
    if _is_reciprocal(node):
        return node.args[0]  # type: ignore[return-value]
    return None


def is_one(operand: Any) -> bool:
    """Whether an operand is a tensor of one element."""
    found = value(operand) if isinstance(operand, Node) else None
    return found is not None and all(isinstance(size, int) and size == 1 for size in found.shape)


def constant(operand: Any) -> float | None:
    """The number that an operand is, or that a tensor of it is filled with; None if it is none."""
    if isinstance(operand, Node) and operand.target is aten.full.default:
        operand = operand.args[1]
    return float(operand) if isinstance(operand, (int, float)) else None
