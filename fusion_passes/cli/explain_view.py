"""What explain shows on a terminal: one row per all-reduce, then the graphs with what was fused marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fusion_passes.folding import fold
from fusion_passes.graph_text import Line
from fusion_passes.inspection import Inspection
from fusion_passes.recorder import RecordedGraph
from fusion_passes.reporting import SiteReport, summary

COLOURS = ("cyan", "magenta", "green", "blue", "bright_red", "bright_cyan")
LEFT_ALONE = "yellow"


def show(console: Console, found: Inspection, graphs: bool) -> None:
    """Print verdicts, and the graphs if asked for."""
    console.print(verdicts(found.sites))
    if graphs:
        for graph in found.graphs:
            for title, lines in (("before", graph.before), ("after", graph.after)):
                console.rule(f"{graph.name}, {title}")
                for text in _graph(graph, lines):
                    console.print(text, soft_wrap=True)
        console.rule()
    console.print(summary(found.sites), highlight=False, markup=False)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, markup=False)


def verdicts(sites: list[SiteReport]) -> Table:
    """Every all-reduce with its place and its verdict."""
    table = Table(title=f"{len(sites)} all-reduces")
    for column in ("all-reduce", "module", "source", "verdict"):
        table.add_column(column, overflow="fold")
    for site in sites:
        verdict = Text(site.rule, "green") if site.rule else Text(str(site.reason), LEFT_ALONE)
        if site.left:
            verdict.append(f"\nthe rest left alone, {site.left}", LEFT_ALONE)
        table.add_row(Text(site.node), Text(site.module), Text(site.source), verdict)
    return table


def _graph(graph: RecordedGraph, lines: tuple[Line, ...]) -> Iterator[Text]:
    colours = _colours(graph.sites)
    for block in fold(lines, graph.verdicts):
        for line in block.lines[: block.period]:
            yield _line(line, colours)
        if block.count > 1:
            yield Text(f"  ... {block.count - 1} more times the {block.period} lines above", "dim italic")


def _line(line: Line, colours: Mapping[str, str]) -> Text:
    colour = colours.get(line.site)
    return Text("  " + line.text, "dim") if colour is None else Text("┃ " + line.text, colour)


def _colours(sites: tuple[SiteReport, ...]) -> dict[str, str]:
    fused = [site.node for site in sites if site.fused]
    colours = {site: COLOURS[index % len(COLOURS)] for index, site in enumerate(fused)}
    return {**{site.node: LEFT_ALONE for site in sites}, **colours}
