"""Nothing in the packages runs text as code, or takes apart what another program has written but for strict JSON."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for package in ("custom_ops", "fusion_passes") for path in sorted((ROOT / package).rglob("*.py"))]

CALLS = {"eval", "exec", "compile", "__import__", "input"}
"""Built-in functions that run text."""

MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "subprocess", "ctypes", "yaml"}
ATTRIBUTES = {("torch", "load"), ("os", "system"), ("os", "popen"), ("dist", "broadcast_object_list")}
"""What unpickles or runs a shell."""

PICKLES_AMONG_ITS_OWN_RANKS = {"bench/timing.py", "ranks.py"}
"""`all_gather_object` between the ranks of one measurement, which one program started."""


def unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func.id
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in MODULES:
            yield node.module
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in ATTRIBUTES:
                yield f"{node.value.id}.{node.attr}"
            if node.attr == "all_gather_object":
                yield node.attr


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_text_becomes_code(path: Path) -> None:
    found = set(unsafe(ast.parse(path.read_text())))
    if "/".join(path.parts[-2:]) in PICKLES_AMONG_ITS_OWN_RANKS or path.name in PICKLES_AMONG_ITS_OWN_RANKS:
        found -= {"all_gather_object"}
    assert found == set()


@pytest.mark.parametrize(
    "text", ["eval(x)", "import pickle", "from pickle import loads", "torch.load(f)", "dist.all_gather_object(a, b)"]
)
def test_what_is_looked_for_is_found(text: str) -> None:
    assert list(unsafe(ast.parse(text)))
