"""Votes between real ranks: one outcome for all, in bounded time, whoever fails or stays away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from custom_ops import consensus
from tests.support.ranks import Ranks

SHORT = timedelta(seconds=2)
"""For votes that a rank misses; the others have the usual bound."""


def vote(
    topic: str, facts: list[dict[str, object]], problems: list[str | None], bound: timedelta = consensus.VOTE_TIMEOUT
) -> str | None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    return consensus.agree(group, topic, facts[rank % len(facts)], problems[rank % len(problems)], bound)


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


def late(topic: str, seconds: float, bound: timedelta) -> tuple[str | None, float]:
    if dist.get_rank() == 1:
        time.sleep(seconds)
    started = time.monotonic()
    return vote(topic, [{}], [None], bound), time.monotonic() - started


def test_late_within_the_bound(ranks: Ranks) -> None:
    assert [outcome for outcome, _ in ranks.run(late, "late", 0.5, timedelta(minutes=1))] == [None, None]


def test_too_late_binds_the_late_rank_too(ranks: Ranks) -> None:
    (first, waited), (second, _) = ranks.run(late, "too late", 8.0, SHORT)
    assert first == second
    assert first is not None
    assert "rank [1] of the group did not vote" in first
    assert waited < 7.0


def away(topic: str) -> str | None:
    return vote(topic, [{}], [None], SHORT) if dist.get_rank() else None


def test_a_rank_that_stays_away_costs_the_bound_and_no_more(ranks: Ranks) -> None:
    assert "rank [0] of the group did not vote" in str(ranks.run(away, "away")[1])


@dataclass
class Member:
    """What a vote needs of a process group, for ranks that are threads."""

    store: Store
    number: int
    size: Callable[[], int]

    def get_group_store(self) -> Store:
        return self.store

    def rank(self) -> int:
        return self.number


def of_threads(stores: list[Store], problem: str | None) -> list[str | None]:
    """The outcome on each of two ranks; the second brings the problem."""
    outcomes: list[str | None] = ["", ""]

    def run(rank: int) -> None:
        member = Member(PrefixStore("group", stores[rank]), rank, lambda: 2)
        outcomes[rank] = consensus.agree(member, "topic", {}, problem if rank else None)  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def stores_of(kind: str, folder: Path) -> list[Store]:
    """One store, as each of two ranks has it."""
    if kind == "hash":
        return [HashStore()] * 2
    if kind == "file":
        return [FileStore(str(folder / "store"), 2) for _ in range(2)]
    server = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    return [server, TCPStore("127.0.0.1", server.port, 2, is_master=False)]


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_a_group_made_again_on_the_same_store_votes_anew(kind: str, tmp_path: Path) -> None:
    """Its name is that of the earlier group, and so are the topics; an old "agreed" would be a wrong one."""
    stores = stores_of(kind, tmp_path)
    assert of_threads(stores, None) == [None, None]
    assert of_threads(stores, "no memory") == ["rank 1 of the group: no memory"] * 2
    assert of_threads(stores, None) == [None, None]


def test_what_a_rank_that_never_came_left_is_a_no(ranks: Ranks) -> None:
    """The one that voted alone and its peer find the same old outcome."""
    first = ranks.run(away, "away for good")[1]
    assert ranks.run(vote, "away for good", [{}], [None]) == [first, first]
