"""Repeated layers are folded, others are not, and no line is lost."""

from __future__ import annotations

from fusion_passes.folding import fold
from fusion_passes.graph_text import Line

LAYER = [f"op{number}" for number in range(20)]


def lines(*texts: str) -> list[Line]:
    return [Line(text, text, "") for text in texts]


def layer(number: int, site: str = "") -> list[Line]:
    return [Line(f"{op}_{number}", f"{op}_{number}: f32[2] = {op}(arg{number}_1)", "", site=site) for op in LAYER]


def test_layers_fold() -> None:
    every = lines("first") + [line for number in range(5) for line in layer(number)] + lines("last", "return")
    blocks = fold(every, {})
    assert [(block.count, block.period) for block in blocks] == [(1, 1), (5, 20), (1, 2)]
    assert [line for block in blocks for line in block.lines] == every


def test_two_layers_do_not() -> None:
    blocks = fold([*layer(0), *layer(1)], {})
    assert [(block.count, block.period) for block in blocks] == [(1, 40)]


def test_layers_of_other_verdicts_do_not() -> None:
    verdicts = {"a": "add_norm", "b": "above_limit"}
    every = [line for number in range(6) for line in layer(number, "a" if number < 3 else "b")]
    assert [(block.count, block.period) for block in fold(every, verdicts)] == [(3, 20), (3, 20)]


def test_types_and_numbers_in_arguments_count() -> None:
    texts = [f"x_{number}: bf16[{number}] = op(arg0_1, {number})" for number in range(100)]
    assert [block.count for block in fold(lines(*texts), {})] == [1]


def test_nothing() -> None:
    assert fold([], {}) == []
