"""One page that shows a model's graphs before and after the pass; needs no network and no other file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment

from fusion_passes.folding import Block, fold
from fusion_passes.inspection import Inspection
from fusion_passes.recorder import RecordedGraph
from fusion_passes.reporting import SiteReport, summary

HUE_STEP = 67
"""Degrees between the hues of neighbouring sites; the same hue comes again after 360 sites."""


@dataclass(frozen=True)
class Region:
    """A site as the page shows it.

    Attributes:
        key: unique on the page.
        report: its verdict.
        hue: of its colour, in degrees; that of what was left alone is fixed.
    """

    key: str
    report: SiteReport
    hue: int


@dataclass(frozen=True)
class Sheet:
    """A graph as the page shows it."""

    name: str
    before: list[Block]
    after: list[Block]
    regions: dict[str, Region]


def render(found: Inspection, title: str) -> str:
    """The page as HTML."""
    template = files("fusion_passes.cli").joinpath("explain_page.html.jinja").read_text(encoding="utf-8")
    sheets = [_sheet(index, graph) for index, graph in enumerate(found.graphs)]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        title=title, found=found, sheets=sheets, summary=summary(found.sites), missed=sum(s.missed for s in found.sites)
    )


def _sheet(index: int, graph: RecordedGraph) -> Sheet:
    regions = {
        site.node: Region(f"g{index}-{site.node}", site, place * HUE_STEP % 360)
        for place, site in enumerate(graph.sites)
    }
    return Sheet(graph.name, fold(graph.before, graph.verdicts), fold(graph.after, graph.verdicts), regions)
