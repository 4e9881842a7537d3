"""Quantisations behind a norm as people write them, recognised from their last node: tables of forms and of operators.

A float8 tensor is made by a cast, of a quotient or product with a scale, clamped or not; whether the scale is given or
is that of each row is seen from the scale. Everything else is an operator that quantises by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._inductor.pattern_matcher import KeywordArg, Match, PatternExpr, is_match
from torch.fx import Node

from custom_ops import formats
from custom_ops.formats import Quantisation
from custom_ops.reference_quant import FLOAT8_MAX
from fusion_passes import quant_ops, scales
from fusion_passes.patterns import CAST, OneOf, Op, either_order, same_shape, value
from fusion_passes.reasons import NotFused
from fusion_passes.scales import Scale

aten = torch.ops.aten
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Quant:
    """A recognised quantisation.

    Attributes:
        form: name of its row in FORMS, or of its operator.
        quantisation: the format with its choices.
        x: what is quantised.
        values: the node that holds the quantised values.
        scale: the scale that the kernel is given; None where it makes its own.
        scale_out: the node that holds the scales that are made; None where the scale is given, or nothing uses them.
        exact: whether it rounds as the kernel does.
        nodes: all nodes that it was matched on.
    """

    form: str
    quantisation: Quantisation
    x: Node
    values: Node
    scale: Scale | None
    scale_out: Node | None
    exact: bool
    nodes: tuple[Node, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for quantisations that give the same values and scales of one norm."""
        return self.quantisation.format.name, self.quantisation.block, self.quantisation.layout, self.scale

    @property
    def replaced(self) -> tuple[Node, ...]:
        """The nodes that outputs of the op take the place of."""
        return (self.values,) if self.scale_out is None else (self.values, self.scale_out)


@dataclass(frozen=True)
class Choice:
    """What the op quantises.

    Attributes:
        quants: equal quantisations of one norm; one output of the op serves them all.
        norm_used: whether anything else uses the norm.
    """

    quants: tuple[Quant, ...]
    norm_used: bool

    @property
    def one(self) -> Quant:
        """Any of them."""
        return self.quants[0]


@dataclass(frozen=True)
class Form:
    """One spelling of a cast to float8."""

    name: str
    pattern: PatternExpr


_X = OneOf(Op(CAST, KeywordArg("x"), torch.float32), KeywordArg("x"))
_SCALED = {
    "divide": Op(aten.div.Tensor, _X, KeywordArg("scale")),
    "multiply": Op(aten.mul.Tensor, _X, KeywordArg("inverse")),
    "multiply_scale_first": Op(aten.mul.Tensor, KeywordArg("inverse"), _X),
}


_LEAST = (aten.clamp_min.default, aten.clamp_min.Tensor)
_MOST = (aten.clamp_max.default, aten.clamp_max.Tensor)
_BOTH = (aten.clamp.default, aten.clamp.Tensor)
"""Bounds are numbers, or where `dynamic=True` hides those, tensors of one element."""


def _clamped(scaled: PatternExpr) -> PatternExpr:
    low, high = KeywordArg("low"), KeywordArg("high")
    inner = OneOf(Op(CAST, scaled, torch.float32), scaled)
    bounded = OneOf(
        Op(_MOST, Op(_LEAST, inner, low), high),
        Op(_LEAST, Op(_MOST, inner, high), low),
        Op(_BOTH, inner, low, high),
        either_order(aten.minimum.default, either_order(aten.maximum.default, inner, low), high),
        either_order(aten.maximum.default, either_order(aten.minimum.default, inner, high), low),
        inner,
    )
    return Op(CAST, OneOf(Op(CAST, bounded, KeywordArg("back")), bounded), FLOAT8)


FORMS = tuple(Form(name, _clamped(scaled)) for name, scaled in _SCALED.items())
"""Every spelling of a cast; the first that matches and fits wins. A new one is a row and a golden test."""

_PASSED = {
    CAST, aten.div.Tensor, aten.mul.Tensor, *_LEAST, *_MOST, *_BOTH,
    aten.minimum.default, aten.maximum.default, aten.round.default, aten.reshape.default,
}  # fmt: skip
_MOST_STEPS = 8
"""Every form takes fewer operators; the rest is for those that get a reason."""


def find(norm: Node, views: list[Node]) -> Iterator[Quant | NotFused]:
    """Every quantisation of a norm, or why one has no known form.

    Args:
        norm: the last node of the norm.
        views: that node and its reshapes.
    """
    for node in _ends(views):
        found = _from_operator(node, views) if quant_ops.is_known(node) else _from_cast(node, views)
        if found is not None:
            yield found


def _ends(views: list[Node]) -> list[Node]:
    """Operators that quantise a view, and casts to a type of eight bits a few steps behind one."""
    ends: dict[Node, None] = {}
    frontier = list(views)
    for _ in range(_MOST_STEPS):
        users = dict.fromkeys(user for node in frontier for user in node.users if user not in ends)
        frontier = []
        for user in users:
            if quant_ops.is_known(user) or (user.target is CAST and user.args[1].itemsize == 1):  # type: ignore[union-attr]
                ends[user] = None
            elif user.target in _PASSED:
                frontier.append(user)
    return list(ends)


def _from_operator(node: Node, views: list[Node]) -> Quant | None:
    found = quant_ops.recognise(node)
    if found is None or found.x not in views:
        return None
    quantisation, scale = found.quantisation, None if found.scale is None else Scale(found.scale)
    return Quant(
        str(node.target), quantisation, found.x, found.values, scale, found.scale_out, found.exact, found.nodes
    )


def _from_cast(node: Node, views: list[Node]) -> Quant | NotFused | None:
    if node.args[1] is not FLOAT8:
        return NotFused("quant_form", f"{node} is {node.args[1]}; the kernel writes {FLOAT8}")
    for form in FORMS:
        match = form.pattern.match(node)
        if is_match(match) and (x := match.kwargs["x"]) in views and _keeps_shape(node, x):
            return _bounds_refusal(node, match) or _build(form, node, match, x)
    return NotFused("quant_form", f"{node} is made of the norm in no known form of a scaled, saturating cast")


def _build(form: Form, node: Node, match: Match, x: Node) -> Quant | NotFused:
    """The quantisation of a match: by a scale that is given, or by that of each row."""
    names, scaled = match.kwargs, _scaled_type(match)
    wide = scaled is torch.float32 and "back" not in names
    inverted = "inverse" in names
    operand = names["inverse"] if inverted else names["scale"]
    if row := scales.of_rows(operand, x, inverted):
        token = formats.choose("fp8_token")
        nodes = (*match.nodes, *row.nodes)
        return Quant(f"{form.name}_by_rows", token, x, node, None, row.root, False, nodes)
    given = scales.given(operand, inverted)
    if isinstance(given, NotFused):
        return given
    exact = wide and "low" in names and inverted and given.is_exact
    return Quant(form.name, formats.choose("fp8"), x, node, given, None, exact, tuple(match.nodes))


def _keeps_shape(node: Node, x: Node) -> bool:
    """Whether a scale of more dimensions has not added any."""
    mine, its = value(node), value(x)
    return mine is not None and its is not None and same_shape(mine, its)


def _scaled_type(match: Match) -> torch.dtype | None:
    """The type in which the quotient or product is taken."""
    node = next(node for node in match.nodes if node.target in (aten.div.Tensor, aten.mul.Tensor))
    found = value(node)
    return None if found is None else found.dtype


def _bounds_refusal(node: Node, match: Match) -> NotFused | None:
    bounds = [match.kwargs[name] for name in ("low", "high") if name in match.kwargs]
    known = [scales.constant(bound) for bound in bounds]
    if not bounds or known == [-FLOAT8_MAX, FLOAT8_MAX]:
        return None
    low, high = (bound if number is None else number for bound, number in zip(bounds, known, strict=True))
    text = f"{node} clamps to {low} and {high}; the kernel to {FLOAT8_MAX}"
    return NotFused("quant_form", text + scales.hint(high))
