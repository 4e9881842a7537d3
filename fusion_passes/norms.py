"""RMSNorm as people write it, recognised from its last node: a table of forms over one shared core.

All forms compute x * rsqrt(mean(x^2) + eps) * weight in float32. They differ in where the result is rounded to the
type of x: after the weight (torch, gpt-oss, Gemma) or before it (Hugging Face Llama, Meta).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.pattern_matcher import KeywordArg, Match, PatternExpr, is_match
from torch.fx import Graph, Node

from fusion_passes.patterns import CAST, OneOf, Op, either_order, same_size, value

aten = torch.ops.aten


@dataclass(frozen=True)
class Norm:
    """A recognised norm.

    Attributes:
        form: name of its row in FORMS.
        x: its input, before any cast to float32.
        out: its last node, of the type of x, or of float32 if it is wide.
        weight: [hidden]; None where there is none.
        weight_bias: constant added to the weight.
        eps: the constant, or the 0-d tensor that holds it.
        rounds_before_weight: rounded to the type of x before the weight is applied, and again after.
        wide: left in float32 although x has 16 bits. Before torch 2.13 Inductor makes this of a norm that is rounded
            and then cast up by its only user, as a quantisation does.
        nodes: all nodes that it was matched on.
    """

    form: str
    x: Node
    out: Node
    weight: Node | None
    weight_bias: float
    eps: float | Node
    rounds_before_weight: bool
    wide: bool
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Form:
    """One spelling of the end of a norm."""

    name: str
    pattern: PatternExpr
    rounds_before_weight: bool = False
    may_be_wide: bool = False


def _core() -> PatternExpr:
    """x * rsqrt(mean(x^2) + eps), in the spellings of every part."""
    x32 = KeywordArg("x32")
    square = OneOf(Op(aten.pow.Tensor_Scalar, x32, 2), Op(aten.mul.Tensor, x32, x32))
    total = Op(aten.sum.dim_IntList, square, KeywordArg("dim"), KeywordArg("keepdim"))
    mean = OneOf(
        Op(aten.mean.dim, square, KeywordArg("dim"), KeywordArg("keepdim")),
        Op(aten.div.Tensor, total, KeywordArg("count")),
    )
    eps = KeywordArg("eps")
    variance = OneOf(Op((aten.add.Tensor, aten.add.Scalar), mean, eps), Op(aten.add.Tensor, eps, mean))
    root = Op(aten.sqrt.default, variance)
    inverse = Op(aten.reciprocal.default, root)
    scale = OneOf(
        Op(aten.rsqrt.default, variance),
        Op(aten.pow.Tensor_Scalar, variance, -0.5),
        Op(aten.mul.Tensor, inverse, 1.0),
        inverse,
    )
    scaled = KeywordArg("scaled")
    return OneOf(either_order(aten.mul.Tensor, scaled, scale), Op(aten.div.Tensor, scaled, root))


_X = _core()
_WEIGHT = KeywordArg("weight")
_DTYPE = KeywordArg("dtype")
_ROUNDED = Op(CAST, _X, _DTYPE)

FORMS = (
    Form("multiply_then_cast", Op(CAST, either_order(aten.mul.Tensor, _X, _WEIGHT), _DTYPE)),
    Form("cast_then_multiply", either_order(aten.mul.Tensor, _ROUNDED, _WEIGHT), rounds_before_weight=True),
    Form("no_weight", _ROUNDED),
    Form("float32", either_order(aten.mul.Tensor, _X, _WEIGHT), may_be_wide=True),
    Form("float32_no_weight", _X, may_be_wide=True),
)
"""Every form; the first that matches a node wins. A new one is a row here and a golden test."""

_ROOTS = {aten.rsqrt.default, aten.sqrt.default, aten.pow.Tensor_Scalar}
_STEPS = {CAST, aten.mul.Tensor, aten.div.Tensor, aten.reciprocal.default}
_MOST_STEPS = 5
"""Every form takes a root, and at most so many of the steps after it."""


def find(graph: Graph) -> dict[Node, list[Norm]]:
    """All norms of a graph, by their input; no norm is part of another."""
    found: dict[Node, list[Norm]] = defaultdict(list)
    inner: set[Node] = set()
    for node in sorted(_possible_ends(graph), reverse=True):
        if node not in inner and (norm := recognise(node)):
            found[norm.x].insert(0, norm)
            inner.update(norm.nodes)
    return found


def _possible_ends(graph: Graph) -> set[Node]:
    """Nodes in which a norm may end: a few steps behind a root."""
    ends: set[Node] = set()
    frontier = {node for target in _ROOTS for node in graph.find_nodes(op="call_function", target=target)}
    for _ in range(_MOST_STEPS):
        frontier = {user for node in frontier for user in node.users if user.target in _STEPS} - ends
        ends |= frontier
    return ends


def recognise(node: Node) -> Norm | None:
    """The norm that ends in this node, or None."""
    for form in FORMS:
        match = form.pattern.match(node)
        if is_match(match) and (norm := _build(form, node, match)):
            return norm
    return None


def _build(form: Form, out: Node, match: Match) -> Norm | None:
    """The norm of a match, if it also meets what a pattern cannot say.

    1. Squares are taken in float32, of the same tensor that is scaled.
    2. The mean is over the last dimension, all of it.
    3. Every cast on the way goes to the type of the input, and so has the result; or there is none, and it is wide.
    4. The weight is one value per column.
    5. Epsilon is one number.
    """
    names = match.kwargs
    x = _uncast(names["x32"])
    val, val32, result = value(x), value(names["x32"]), value(out)
    if val is None or val32 is None or result is None or not val.dim():
        return None
    if val32.dtype != torch.float32 or _uncast(names["scaled"]) is not x:  # 1
        return None
    if not _is_mean_of_rows(names, val):  # 2
        return None
    wide = form.may_be_wide and result.dtype == torch.float32 != val.dtype
    if not wide and not val.dtype == result.dtype == names.get("dtype", val.dtype):  # 3
        return None
    weight, bias = _split_weight(names["weight"]) if "weight" in names else (None, 0.0)
    if "weight" in names and not _is_row(weight, val):  # 4
        return None
    eps = _constant(names["eps"])
    if not _is_number(eps):  # 5
        return None
    return Norm(form.name, x, out, weight, bias, eps, form.rounds_before_weight, wide, tuple(match.nodes))


def _is_mean_of_rows(names: dict[str, Any], x: torch.Tensor) -> bool:
    last = list(names["dim"]) in ([-1], [x.dim() - 1])
    hidden = x.shape[-1]
    counted = "count" not in names or (isinstance(hidden, int) and names["count"] == hidden)
    return last and names["keepdim"] is True and counted


def _is_row(weight: Node | None, x: torch.Tensor) -> bool:
    found = None if weight is None else value(weight)
    return found is not None and found.dim() == 1 and same_size(found.shape[0], x.shape[-1])


def _constant(eps: Any) -> Any:
    """The number that a node is filled with, or the tensor before its casts; anything else as it is."""
    while isinstance(eps, Node) and eps.target is CAST:
        eps = eps.args[0]
    if isinstance(eps, Node) and eps.target is aten.full.default:
        return eps.args[1]
    return eps


def _is_number(eps: object) -> bool:
    if isinstance(eps, Node):
        found = value(eps)
        return found is not None and found.dim() == 0
    return isinstance(eps, (int, float))


def _uncast(node: Any) -> Any:
    """The tensor before a cast up to float32; anything else as it is."""
    if isinstance(node, Node) and node.target is CAST and node.args[1] is torch.float32:
        source = node.args[0]
        found = value(source) if isinstance(source, Node) else None
        if found is not None and found.dtype in (torch.bfloat16, torch.float16):
            return source
    return node


_SHIFTED = Op(aten.add.Tensor, KeywordArg("stored"), KeywordArg("bias"))


def _split_weight(node: Any) -> tuple[Node | None, float]:
    """(stored weight, constant added to it in float32); (None, 0) for what is no tensor."""
    if not isinstance(node, Node):
        return None, 0.0
    match = _SHIFTED.match(node)
    found = value(node)
    if is_match(match) and found is not None and found.dtype == torch.float32:
        stored, bias = match.kwargs["stored"], match.kwargs["bias"]
        if isinstance(stored, Node) and isinstance(bias, (int, float)):
            return _uncast(stored), float(bias)
    return _uncast(node), 0.0
