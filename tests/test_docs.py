"""The documentation says what is so: its code runs, its links lead somewhere, its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mktestdocs import grab_code_blocks

import custom_ops
import fusion_passes
from custom_ops import limits
from fusion_passes import compat, norms, rules
from tests.support.programs import HIDDEN, NORMS, JustNorm, tensors

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.usefixtures("fake_group")
def test_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"model": JustNorm(NORMS["meta"]()), "x": tensors(2, 8, HIDDEN, count=1)[0]}
    with compat.without_caches():
        for block in grab_code_blocks((ROOT / "README.md").read_text(), lang="python"):
            exec(block, names)
    assert "norm" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text()):
        found = [ROOT / name, ROOT / "custom_ops" / name, ROOT / "fusion_passes" / name]
        assert any(path.exists() for path in found), name


def test_every_module_of_the_packages_is_named_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for package in ("custom_ops", "fusion_passes"):
        for path in (ROOT / package).glob("*.py"):
            public = path.stem.startswith("__") or path.stem in (
                "allreduce_norm",
                "all_reduce",
                "config",
                "graph_text",
                "ranks",
            )
            assert public or path.name in text, path.name


def test_rules_and_tables_that_are_named_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for norm in rules.NORMS:
        assert f"`{norm.name}`" in text
    named = [rule for rule in rules.RULES if f"`{rule.name}`" in text]
    assert {rule.format for rule in named} == {None, *custom_ops.FORMATS}
    assert all(f"`{name}`" in (ROOT / "docs" / "numerics.md").read_text() for name in custom_ops.FORMATS)
    assert norms.FORMS
    assert limits.measured()["NVIDIA H200", 2].at(4096).one_shot_bytes == 32 * limits.MIB, (
        "docs/performance.md says 32 MiB"
    )
    assert f"PDL_ADVANCE_LAUNCH_TOKENS` = {custom_ops.PDL_ADVANCE_LAUNCH_TOKENS}" in (ROOT / "docs/pdl.md").read_text()


def test_public_names_have_docstrings() -> None:
    for package in (custom_ops, fusion_passes):
        for name in package.__all__:
            value = getattr(package, name)
            assert isinstance(value, int) or value.__doc__, name


def test_modules_stay_small() -> None:
    for package in ("custom_ops", "fusion_passes"):
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 250, path
