"""From an all-reduce to the norm that follows it: the site of a fusion, or why there is none. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fusion_passes import collectives, diagnosis, norms
from fusion_passes import steps as steps_
from fusion_passes.collectives import AllReduce
from fusion_passes.norms import Norm
from fusion_passes.patterns import same_size, value
from fusion_passes.quants import Choice
from fusion_passes.reasons import NotFused
from fusion_passes.steps import Operand, Step

aten = torch.ops.aten
_MOST_STEPS = 4


@dataclass(frozen=True)
class Site:
    """An all-reduce, what happens to its sum, and the norm of that.

    Attributes:
        all_reduce: the collective.
        steps: what happens to the sum; mostly one, the addition of the residual.
        total: the node that stands for the new residual: that of the last step, or the sum.
        norm: the norm of total, or of a view of it.
        choice: what the op quantises of the norm; None where it does not.
        left: why a quantisation of the norm is left to Inductor; None where there is none.
    """

    all_reduce: AllReduce
    steps: tuple[Step, ...]
    total: Node
    norm: Norm
    choice: Choice | None = None
    left: NotFused | None = None

    @property
    def addends(self) -> list[Node]:
        """The tensors that are added to the sum."""
        return [operand for step in self.steps if step.adds and isinstance(operand := step.operand, Node)]

    @property
    def factors(self) -> list[Operand]:
        """The numbers and 0-d tensors that the sum is multiplied or divided by."""
        return [step.operand for step in self.steps if not step.adds and not step.does_nothing]


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
    result = views_of(all_reduce.result)
    if norm := _norm_of(result, around):
        return Site(all_reduce, (), all_reduce.result, norm)
    for view in result:
        for user in view.users:
            if site := _behind(all_reduce, steps_.recognise(user, view), around):
                return _refusal(site, result, claimed) or site
    return diagnosis.explain(result, around.norms)


def _behind(all_reduce: AllReduce, step: Step | None, around: Surroundings) -> Site | None:
    """The site whose first step is given: on from it as long as there is one way to go."""
    taken: list[Step] = []
    while step and len(taken) < _MOST_STEPS:
        taken.append(step)
        views = views_of(step.node)
        if norm := _norm_of(views, around):
            return Site(all_reduce, tuple(taken), step.node, norm)
        uses = [(user, view) for view in views for user in view.users if user not in views]
        step = steps_.recognise(*uses[0]) if len(uses) == 1 else None
    return None


def _refusal(site: Site, result: list[Node], claimed: set[Node]) -> NotFused | None:
    """What speaks against a site with steps: its norm is taken, or the sum is needed beside it."""
    first = site.steps[0].first
    if site.total in claimed:
        text = f"a later all-reduce, also added in {site.total}, takes the norm {site.norm.out}"
        return NotFused("norm_shared", text)
    for use in (user for view in result for user in view.users if user is not first and user not in result):
        if use.target is aten.copy_.default:
            text = f"the sum is written back to {use.args[0]}; reduce a tensor that is made inside the graph"
            return NotFused("written_back", text)
        return NotFused("sum_used", f"besides {first}, {use} uses the sum, which no output of the kernel holds")
    return None


def views_of(node: Node) -> list[Node]:
    """A node and its reshapes that keep the last dimension, reshapes of reshapes included."""
    found = [node]
    for view in found:
        found += [user for user in view.users if user.target is aten.reshape.default and _same_rows(user, view)]
    return found


def _same_rows(node: Node, other: Node) -> bool:
    """Whether two tensors have rows of one length."""
    a, b = value(node), value(other)
    return a is not None and b is not None and bool(a.dim() and b.dim()) and same_size(a.shape[-1], b.shape[-1])


def _norm_of(views: list[Node], around: Surroundings) -> Norm | None:
    return next((norm for view in views for norm in around.norms.get(view, ())), None)
