"""The pass with its eyes open: every graph before and after, and which nodes went into which call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph

from fusion_passes import compat, graph_text
from fusion_passes.allreduce_rms_fusion import AllReduceRMSFusionPass
from fusion_passes.config import FusionConfig
from fusion_passes.environment import Environment
from fusion_passes.graph_text import Line
from fusion_passes.overlap import Overlap
from fusion_passes.reporting import SiteReport
from fusion_passes.sites import Site


@dataclass(frozen=True)
class RecordedGraph:
    """One compiled graph.

    Attributes:
        name: of the graph.
        before: its nodes as the pass found them; those of a site carry the name of its all-reduce.
        after: its nodes as the pass left them; likewise.
        sites: verdicts for its all-reduces.
    """

    name: str
    before: tuple[Line, ...]
    after: tuple[Line, ...]
    sites: tuple[SiteReport, ...]

    @property
    def verdicts(self) -> dict[str, str]:
        """Rule or reason code of each all-reduce, by its name."""
        return {site.node: site.verdict for site in self.sites}

    def part(self, site: str) -> tuple[str, str]:
        """Text of one site before and after, by the name of its all-reduce."""
        before, after = (
            "\n".join(line.text for line in lines if line.site == site) for lines in (self.before, self.after)
        )
        return before, after


class Recorder(AllReduceRMSFusionPass):
    """Fuses like its parent and keeps what it saw; publishes to itself instead of to fusion_passes.report().

    Attributes:
        graphs: what was compiled, in order; graphs without an all-reduce too.
    """

    def __init__(self, config: FusionConfig | None = None, environment: Environment | None = None) -> None:
        super().__init__(config, environment)
        self.graphs: list[RecordedGraph] = []
        self._sites: list[SiteReport] = []
        self._owners: dict[str, str] = {}

    @property
    def sites(self) -> list[SiteReport]:
        """Verdicts for the all-reduces of all graphs."""
        return [site for graph in self.graphs for site in graph.sites]

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Rewrite a graph in place and record it."""
        self._sites, self._owners = [], {}
        before = graph_text.lines(graph)
        super().__call__(graph, is_inference)
        self._owners.update({site.node: site.node for site in self._sites})
        self.graphs.append(
            RecordedGraph(
                compat.graph_name(), self._owned(before), self._owned(graph_text.lines(graph)), tuple(self._sites)
            )
        )

    def replace(self, graph: Graph, site: Site | Overlap) -> bool:
        """Replace a site and note the nodes that went and those that came."""
        owner = site.all_reduce.node.name
        before = {node.name for node in graph.nodes}
        in_order = super().replace(graph, site)
        after = {node.name for node in graph.nodes}
        self._owners.update(dict.fromkeys(before ^ after, owner))
        return in_order

    def publish(self, graph: str, sites: list[SiteReport]) -> None:
        """Keep the verdicts of a graph."""
        self._sites = sites

    def uuid(self) -> Any:
        """None: what is recorded must be compiled."""
        return None

    def _owned(self, lines: Iterable[Line]) -> tuple[Line, ...]:
        return tuple(replace(line, site=self._owners.get(line.name, "")) for line in lines)
