"""All-reduces as they reach the post-grad graph: a table of forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.pattern_matcher import Ignored, KeywordArg, PatternExpr, is_match
from torch.fx import Graph, Node

from fusion_passes.patterns import Op, bind
from fusion_passes.reasons import NotFused

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class AllReduce:
    """A recognised all-reduce.

    Attributes:
        node: the collective.
        result: the sum, once waited for.
        reduce_op: "sum", "avg", ...
        group: name of the process group, or a node that stands for it.
    """

    node: Node
    result: Node
    reduce_op: str
    group: Any

    @property
    def input(self) -> Node:
        """This rank's contribution; read from the graph, where an earlier rewrite may have replaced it."""
        (found, _), *_ = bind(self.node)
        assert isinstance(found, Node)
        return found


FORMS: tuple[PatternExpr, ...] = (
    Op(
        c10d.wait_tensor.default,
        Op(c10d.all_reduce.default, Ignored(), KeywordArg("reduce_op"), KeywordArg("group")),
    ),
)
"""Every form, from its last node. A new one is a row here and a golden test."""

TARGETS = {c10d.all_reduce.default, c10d.all_reduce_.default, c10d.all_reduce_coalesced.default}
"""Operators that get a verdict."""


def find(graph: Graph) -> list[Node]:
    """Every all-reduce of a graph, in its order."""
    return [node for node in graph.nodes if node.target in TARGETS]


def recognise(node: Node) -> AllReduce | NotFused:
    """The all-reduce of a node, or why it has no known form."""
    users = list(node.users)
    if len(users) == 1:
        for form in FORMS:
            match = form.match(users[0])
            if is_match(match):
                names = match.kwargs
                return AllReduce(node, users[0], names["reduce_op"], names["group"])
    found = ", ".join(str(user.target) for user in users) or "nothing"
    return NotFused("collective_form", f"{node.target} is used by {found}, not by one wait_tensor")
