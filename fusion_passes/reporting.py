"""A verdict for every all-reduce of every compiled graph: as data, and as one log line per graph."""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass

from torch.fx import Node

from fusion_passes.reasons import NotFused

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
    """

    node: str
    fused: bool
    rule: str | None
    reason: NotFused | None
    module: str
    source: str
    graph: str


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


def verdict(node: Node, graph: str, outcome: str | NotFused) -> SiteReport:
    """The report of one all-reduce: the name of its rule, or why not."""
    fused = isinstance(outcome, str)
    return SiteReport(
        node=node.name,
        fused=fused,
        rule=outcome if isinstance(outcome, str) else None,
        reason=None if isinstance(outcome, str) else outcome,
        module=_module_of(node),
        source=_source_of(node),
        graph=graph,
    )


def publish(graph: str, sites: list[SiteReport]) -> None:
    """Keep the verdicts of one graph and log a line that sums them up."""
    if not sites:
        return
    _REPORTS.extend(sites)
    rules = Counter(site.rule for site in sites if site.rule)
    reasons = Counter(site.reason.code for site in sites if site.reason)
    logger.info(
        "%s: %d of %d all-reduces fused (%s); left alone: %s",
        graph,
        rules.total(),
        len(sites),
        ", ".join(f"{name} {count}" for name, count in rules.items()) or "-",
        ", ".join(f"{code} {count}" for code, count in reasons.items()) or "-",
    )


def _module_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path)


def _source_of(node: Node) -> str:
    """The innermost frame outside of PyTorch; the innermost of all where there is none."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    frames = [line.split('"')[1::2] + line.split(", line ")[1:] for line in lines if line.startswith('File "')]
    places = [f"{frame[0]}:{frame[-1].split(',')[0]}" for frame in frames if len(frame) >= 2]
    outside = [place for place in places if "/torch/" not in place]
    return (outside or places or [""])[-1]
