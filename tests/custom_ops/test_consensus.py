"""Votes between real ranks: one outcome for all, in bounded time, whoever fails or stays away."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from custom_ops import consensus
from tests.support.ranks import Ranks

SHORT = timedelta(seconds=2)


def vote(topic: str, facts: list[dict[str, object]], problems: list[str | None]) -> str | None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    return consensus.agree(group, topic, facts[rank % len(facts)], problems[rank % len(problems)], SHORT)


def test_all_agree(four_ranks: Ranks) -> None:
    assert four_ranks.run(vote, "all agree", [{"version": "1", "sizes": [1, 2]}], [None]) == [None] * 4


def test_one_cannot(four_ranks: Ranks) -> None:
    for rank in range(4):
        problems = [None] * rank + ["no memory"] + [None] * (3 - rank)
        outcomes = four_ranks.run(vote, f"one cannot {rank}", [{}], problems)
        assert outcomes == [f"rank {rank} of the group: no memory"] * 4


def test_facts_differ(four_ranks: Ranks) -> None:
    facts: list[dict[str, object]] = [{"version": "1"}] * 3 + [{"version": "2"}]
    outcomes = four_ranks.run(vote, "facts differ", facts, [None])
    assert outcomes == ["version differs: '1' on rank 0, '2' on rank 3 of the group"] * 4


def late(topic: str, seconds: float) -> tuple[str | None, float]:
    if dist.get_rank() == 1:
        time.sleep(seconds)
    started = time.monotonic()
    return vote(topic, [{}], [None]), time.monotonic() - started


def test_late_within_the_bound(ranks: Ranks) -> None:
    assert [outcome for outcome, _ in ranks.run(late, "late", 0.5)] == [None, None]


def test_too_late_binds_the_late_rank_too(ranks: Ranks) -> None:
    (first, waited), (second, _) = ranks.run(late, "too late", 4.0)
    assert first == second
    assert first is not None
    assert "rank [1] of the group did not vote" in first
    assert waited < 3.5


def away(topic: str) -> str | None:
    return vote(topic, [{}], [None]) if dist.get_rank() else None


def test_a_rank_that_stays_away_costs_the_bound_and_no_more(ranks: Ranks) -> None:
    assert "rank [0] of the group did not vote" in str(ranks.run(away, "away")[1])
