"""A verdict for every all-reduce of every compiled graph: as data, and as one log line per graph."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch._logging import trace_structured
from torch._ops import OpOverload
from torch.fx import Node

from custom_ops import workspace
from fusion_passes.origins import module_of, source_of
from fusion_passes.patterns import bind
from fusion_passes.reasons import EXCUSED, NotFused

logger = logging.getLogger("fusion_passes")


@dataclass(frozen=True)
class SiteReport:
    """What became of one all-reduce.

    Attributes:
        node: name of the all-reduce in its graph.
        fused: whether the fused op replaced it.
        rule: name of the rule that served it; None if not fused.
        reason: why it was left alone; None if fused. `reason.code` is fixed, `reason.text` a sentence.
        module: path of the module that it comes from, such as "model.layers.0.mlp.down_proj"; "" if unknown.
        source: "file:line" of the model code that it comes from; "" if unknown.
        graph: name of the compiled graph.
        left: why what follows was left to Inductor: a quantisation of the norm, or, with rule "overlap", the norm.
        group: name of its process group; "" if unknown.
    """

    node: str
    fused: bool
    rule: str | None
    reason: NotFused | None
    module: str
    source: str
    graph: str
    left: NotFused | None = None
    group: str = ""

    @property
    def problem(self) -> str | None:
        """Why the op runs unfused all the same, such as a group over several hosts: known once its ranks have voted."""
        return workspace.problem_of(self.group) if self.fused else None

    @property
    def verdict(self) -> str:
        """In a word: the rule, or the code of the reason."""
        return self.rule or (self.reason.code if self.reason else "")

    @property
    def verdict_text(self) -> str:
        """In a sentence: the rule or the reason, why what follows was left alone, and why the op runs unfused."""
        left = f"; the rest left alone, {self.left}" if self.left else ""
        unfused = f"; runs unfused: {problem}" if (problem := self.problem) else ""
        return f"{self.rule or self.reason}{left}{unfused}"

    @property
    def missed(self) -> bool:
        """Whether a fusion was to be expected and did not come about."""
        return any(why is not None and why.code not in EXCUSED for why in (self.reason, self.left))

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.module, self.source)))
        return f"{self.node} ({place or 'place unknown'}): {self.verdict_text}"


class FusionError(RuntimeError):
    """An all-reduce did not fuse where it was expected to; raised with FusionConfig(strict=True)."""


_REPORTS: list[SiteReport] = []
"""The registry: verdicts of all graphs compiled since reset_report()."""


def report() -> list[SiteReport]:
    """Verdicts for every all-reduce of every graph compiled since reset_report(), in the order of compilation.

    A graph that Inductor takes from its cache is not compiled again and adds no verdicts;
    `torch._inductor.config.force_disable_caches` makes it compile.
    """
    return list(_REPORTS)


def reset_report() -> None:
    """Forget all verdicts."""
    _REPORTS.clear()


def verdict(node: Node, graph: str, outcome: str | NotFused, left: NotFused | None = None) -> SiteReport:
    """The report of one all-reduce: the name of its rule, or why not; and why the rest was left alone."""
    fused = isinstance(outcome, str)
    return SiteReport(
        node=node.name,
        fused=fused,
        rule=outcome if isinstance(outcome, str) else None,
        reason=None if isinstance(outcome, str) else outcome,
        module=module_of(node),
        source=source_of(node),
        graph=graph,
        left=left,
        group=_group_of(node),
    )


def _group_of(node: Node) -> str:
    """The name of the process group of a collective: the last argument of each."""
    last = bind(node)[-1][0] if isinstance(node.target, OpOverload) else ""
    return last if isinstance(last, str) else ""


def publish(graph: str, sites: list[SiteReport]) -> None:
    """Keep the verdicts of one graph, log a line that sums them up, and write them to torch's structured trace."""
    if not sites:
        return
    _REPORTS.extend(sites)
    logger.info("%s: %s", graph, summary(sites))
    for site in sites:
        logger.debug("%s: %s", graph, site)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "fusion_passes", "encoding": "json"},
        payload_fn=lambda: json.dumps([asdict(site) for site in sites]),
    )


def require(sites: list[SiteReport]) -> None:
    """Raise FusionError with the report if a fusion was missed."""
    if any(site.missed for site in sites):
        raise FusionError(f"{summary(sites)}\n{describe(sites)}")


def summary(sites: Sequence[SiteReport]) -> str:
    """One line: how many fused by which rule, and why not the others."""
    rules = Counter(site.rule for site in sites if site.rule)
    codes = Counter(why.code for site in sites for why in (site.reason, site.left) if why)
    fused, left = (", ".join(f"{name} {count}" for name, count in found.items()) or "-" for found in (rules, codes))
    return f"{rules.total()} of {len(sites)} all-reduces fused ({fused}); left alone: {left}"


def describe(sites: Sequence[SiteReport]) -> str:
    """One line for each all-reduce; those that were missed are marked."""
    return "\n".join(f"{'!' if site.missed else ' '} {site}" for site in sites)
