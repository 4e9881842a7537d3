"""docs/field-failures.md: every row says what makes the failure impossible here and names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "docs" / "field-failures.md").read_text().splitlines()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in LINES
    if line.startswith("|") and not line.startswith(("| report", "|---"))
]


@cache
def names_in(file: str) -> set[str]:
    """Names of the test functions and methods of a file."""
    tree = ast.parse((ROOT / file).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_row_names_tests_that_exist(row: list[str]) -> None:
    report, here, named = row
    assert report
    assert here
    found = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", named)
    assert found, "a row needs a test"
    assert len(found) == named.count("`") // 2, "nothing but tests"
    for file, name in found:
        assert name in names_in(file), f"{file}::{name}"


def test_no_row_was_lost() -> None:
    reports = {name for row in ROWS for name in re.findall(r"\w+#\d+", row[0])}
    assert len(ROWS) == 52
    assert len(reports) == 87
