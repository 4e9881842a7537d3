"""What torch.compile shows at the post-grad hook and what its graphs compute, without generating code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph

import fusion_passes
from fusion_passes import compat, graph_text, tracing


@dataclass
class Captured:
    """What one compilation showed.

    Attributes:
        before: text of each graph as the pass finds it.
        after: text of each graph as the pass leaves it.
        final: text of each graph after all post-grad passes.
        sites: verdicts for all all-reduces of all graphs.
        result: what the call returned.
    """

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    final: list[str] = field(default_factory=list)
    sites: list[fusion_passes.SiteReport] = field(default_factory=list)
    result: Any = None

    @property
    def rules(self) -> list[str]:
        """Rule or reason code of each site."""
        return [site.verdict for site in self.sites]


def capture(
    fn: Callable[..., Any],
    *inputs: Any,
    config: fusion_passes.FusionConfig | None = None,
    dynamic: bool | None = None,
    no_grad: bool = True,
    fullgraph: bool = True,
    passes: Sequence[compat.Pass] | None = None,
    **kwargs: Any,
) -> Captured:
    """Compile and call a function, in a fresh Dynamo, and return what was seen."""
    captured = Captured()

    def look(into: list[str]) -> Callable[[Graph], None]:
        return lambda graph: into.append(graph_text.render(graph))

    def after(graph: Graph) -> None:
        graph.lint()
        captured.after.append(graph_text.render(graph))

    ours = (fusion_passes.AllReduceRMSFusionPass(config),) if passes is None else tuple(passes)
    hook = (tracing.Snapshot(look(captured.before)), *ours, tracing.Snapshot(after))
    fusion_passes.reset_report()
    with torch.set_grad_enabled(not no_grad):
        captured.result = tracing.call(
            fn, inputs, kwargs, hook, dynamic=dynamic, fullgraph=fullgraph, final=look(captured.final)
        )
    captured.sites = fusion_passes.report()
    return captured


def renumbered(text: str) -> str:
    """A graph whose sums, products and sizes are numbered by their place: where sizes are not known, torch leaves gaps."""
    names: dict[str, str] = {}
    counts: Counter[str] = Counter()

    def name(match: re.Match[str]) -> str:
        if match[0] not in names:
            kind = match[1]
            names[match[0]] = f"{kind}_{counts[kind]}" if counts[kind] else kind
            counts[kind] += 1
        return names[match[0]]

    return re.sub(r"\b(add|mul|sym_size_int)(_\d+)?\b(?![.(])", name, text)
