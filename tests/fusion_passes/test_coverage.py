"""Every causal language model of transformers with a tensor-parallel plan: docs/coverage.md says what is so."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from torch import Tensor

from fusion_passes import reasons, rules
from tests.support import write_coverage, zoo
from tests.support.agreement import with_eager
from tests.support.models import SCALED_EMBEDDING, token_ids
from tests.support.ranks import Ranks
from tests.support.zoo import Row

ROWS = {row.name: row for row in write_coverage.rows()}
RUNS = [row.name for row in ROWS.values() if row.fuses]
TENTH = sorted(random.Random(os.environ.get("COVERAGE_SEED", zoo.RELEASE)).sample(RUNS, len(ROWS) // 10))
"""Architectures whose values are compared; another seed takes others."""

pytestmark = pytest.mark.skipif(
    version("transformers") != zoo.RELEASE, reason=f"the table is that of transformers {zoo.RELEASE}"
)


def test_page_has_every_architecture_once_and_nothing_written_by_hand_in_its_table() -> None:
    assert list(ROWS) == zoo.architectures()
    assert write_coverage.PAGE.read_text() == write_coverage.page(list(ROWS.values()), write_coverage.notes())
    known = {rule.name for rule in rules.RULES} | set(reasons.CODES)
    named = {
        part.split()[0]
        for row in ROWS.values()
        for part in f"{row.fused}, {row.left}".split(", ")
        if part[:1].isalpha() and row.fused != "-"
    }
    assert named <= known


def test_enough_fuse() -> None:
    whole = [row for row in ROWS.values() if row.fuses and row.reasons <= write_coverage.EXPECTED]
    assert len(whole) >= 79
    assert len(RUNS) >= 90


def on_this_torch(row: Row) -> Row:
    """A row without what depends on the release of torch: where a graph breaks, and how an embedding is scaled."""
    if torch.__version__.startswith(zoo.TORCH):
        return row
    fused: Counter[str] = Counter()
    for part in row.fused.split(", ") if row.fuses else ():
        rule, count = part.split()
        fused[SCALED_EMBEDDING if rule == "folded_norm" else rule] += int(count)
    return replace(row, all_reduces=row.all_reduces.split()[0], fused=zoo.counted(fused) if fused else row.fused)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", ROWS)
def test_verdicts(name: str) -> None:
    assert on_this_torch(zoo.measure(name)) == on_this_torch(ROWS[name])


def values(name: str) -> tuple[int, float, float]:
    """(sites fused, share of tokens whose logits are close to eager's, their median difference)."""
    model, ids = zoo.build(name), token_ids(2, 16)

    def logits(ids: Tensor) -> Tensor:
        return model(ids, use_cache=False).logits  # type: ignore[no-any-return]

    captured, difference = with_eager(logits, ids, fullgraph=False)
    fused = sum(site.fused for site in captured.sites)
    return fused, (difference < 0.08).float().mean().item(), difference.median().item()


@pytest.mark.parametrize("name", TENTH)
def test_values_of_a_tenth(ranks: Ranks, name: str) -> None:
    for fused, close, median in ranks.run(values, name, timeout=300.0):
        assert fused == sum(int(part.split()[1]) for part in ROWS[name].fused.split(", "))
        assert median < 0.05
        # A router may send some tokens to other experts for the last bit of their norm.
        assert close >= 0.8
