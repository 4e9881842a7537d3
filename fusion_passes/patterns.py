"""Pattern expressions that Inductor's matcher does not have: calls by schema, alternatives, either order.

They are `PatternExpr`s and combine with Inductor's own. `pattern.match(node)` changes nothing and works for any rank,
dtype and scalar, because nothing but operators and the places of their arguments is compared.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._inductor.pattern_matcher import (
    FailedMatch,
    KeywordArg,
    Match,
    MatchContext,
    MatchResult,
    PatternExpr,
    is_match,
)
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

_OTHER_TARGET, _OTHER_ARGUMENT, _NO_ALTERNATIVE = map(FailedMatch, ("target", "argument", "alternatives"))
CAST = torch.ops.prims.convert_element_type.default


class Op(PatternExpr):
    """A call of one of some operators, whatever the number of its users.

    Arguments are compared by their place in the schema, so positional and keyword spellings are the same. An argument
    that the pattern does not name must have its default value.
    """

    def __init__(self, targets: OpOverload | tuple[OpOverload, ...], *args: object) -> None:
        super().__init__()
        self.targets = targets if isinstance(targets, tuple) else (targets,)
        self.args = args

    def _match(self, node: Node, ctx: MatchContext) -> MatchResult:
        if not isinstance(node, Node) or node.op != "call_function" or node.target not in self.targets:
            return _OTHER_TARGET
        match = Match(ctx, self)
        for position, (value, default) in enumerate(bind(node)):
            wanted = self.args[position] if position < len(self.args) else default
            if isinstance(wanted, KeywordArg):  # the most frequent by far: no match object for it
                if match.kwargs.setdefault(wanted.name, value) != value:
                    return _OTHER_ARGUMENT
            elif isinstance(wanted, PatternExpr):
                child = ctx.match(wanted, value)
                if not is_match(child):
                    return child
                match.extend(child)
            elif isinstance(value, Node) or value != wanted:
                return _OTHER_ARGUMENT
        match.nodes.append(node)
        return match


class OneOf(PatternExpr):
    """The first of some patterns that matches."""

    def __init__(self, *patterns: PatternExpr) -> None:
        super().__init__()
        self.patterns = patterns

    def _match(self, node: Node, ctx: MatchContext) -> MatchResult:
        before = dict(ctx.pattern_to_node)
        for pattern in self.patterns:
            try:
                found = ctx.match(pattern, node)
            except FailedMatch as error:  # a name bound to two different nodes
                found = error
            if is_match(found):
                return found
            ctx.pattern_to_node = dict(before)
        return _NO_ALTERNATIVE


def either_order(target: OpOverload, a: object, b: object) -> OneOf:
    """A call of a commutative operator, its two arguments in either order."""
    return OneOf(Op(target, a, b), Op(target, b, a))


def bind(node: Node) -> list[tuple[Any, Any]]:
    """(value, default) of every argument of an operator call, in the order of its schema."""
    assert isinstance(node.target, OpOverload)
    schema, args, kwargs = _schema(node.target), node.args, node.kwargs
    given = len(args)
    return [
        (args[place] if place < given else kwargs.get(name, default) if kwargs else default, default)
        for place, (name, default) in enumerate(schema)
    ]


@cache
def _schema(target: OpOverload) -> list[tuple[str, Any]]:
    return [(a.name, a.default_value if a.has_default_value() else _REQUIRED) for a in target._schema.arguments]


_REQUIRED = object()


def value(node: Node) -> torch.Tensor | None:
    """The fake tensor that a node stands for; None where it is no tensor."""
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else None


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are known to be equal, without a new guard."""
    return a is b or bool(statically_known_true(a == b))


def same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are known to have the same shape, without a new guard."""
    return a.dim() == b.dim() and all(same_size(x, y) for x, y in zip(a.shape, b.shape, strict=True))


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known to be contiguous, without a new guard."""
    known = not tensor._has_symbolic_sizes_strides
    return tensor.is_contiguous() if known else bool(is_contiguous_or_false(tensor))
