"""Repeated layers of a graph: where a block of lines comes again and again, one of them is enough to read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion_passes.graph_text import Line

_SHORTEST, _LONGEST = 16, 2000
_FEWEST = 3


@dataclass(frozen=True)
class Block:
    """Some lines in a row.

    Attributes:
        lines: all of them.
        period: after so many lines they begin again; len(lines) where they do not.
    """

    lines: tuple[Line, ...]
    period: int

    @property
    def count(self) -> int:
        """How often the same lines come."""
        return len(self.lines) // self.period if self.lines else 0


def fold(lines: Sequence[Line], verdicts: Mapping[str, str]) -> list[Block]:
    """Cut lines into blocks; those that are equal but for the numbers in their names, three times or more, are one.

    Args:
        lines: of a graph.
        verdicts: of its all-reduces by name; blocks of different verdicts are not equal.
    """
    shapes: dict[str, int] = {}
    keys = [shapes.setdefault(_shape(line, verdicts), len(shapes)) for line in lines]
    blocks: list[Block] = []
    start = at = 0
    while at < len(keys):
        period, end = _repeat(keys, at)
        if not period:
            at += 1
            continue
        blocks += _plain(lines[start:at])
        blocks.append(Block(tuple(lines[at:end]), period))
        start = at = end
    return blocks + _plain(lines[start:])


def _plain(lines: Sequence[Line]) -> list[Block]:
    return [Block(tuple(lines), len(lines))] if lines else []


def _repeat(keys: list[int], at: int) -> tuple[int, int]:
    """(period, end) of the repetition that begins here and has the shortest period; (0, at) if there is none."""
    for period in range(_SHORTEST, min(_LONGEST, (len(keys) - at) // _FEWEST) + 1):
        if keys[at] != keys[at + period]:
            continue
        end = at + period
        while end + period <= len(keys) and keys[at : at + period] == keys[end : end + period]:
            end += period
        if end - at >= _FEWEST * period:
            return period, end
    return 0, at


def _shape(line: Line, verdicts: Mapping[str, str]) -> str:
    """The text without the numbers that tell nodes of one kind apart."""
    text = re.sub(r"\barg\d+_\d+\b", "arg", line.text)
    kind = re.sub(r"\b([A-Za-z_]\w*?)(?:_\d+)+\b", r"\1", text)
    return f"{verdicts.get(line.site, '')} {kind}"
