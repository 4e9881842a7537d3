"""Ranks agree before they act: a vote over the group's key-value store.

No device takes part, so nobody spins in a kernel while another rank compiles, and every wait is bounded. The outcome is
one key that the first rank to finish writes and every rank reads: a rank that comes late, or never, cannot make the
others disagree. All ranks of a group vote in the same order, each once per topic. The last to read it leaves nothing
behind: a process group that is made again on the same store must not find what an earlier one agreed on. A vote that
missed a rank stays, for that rank may still come.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup, Store

VOTE_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the votes of the others; after it the answer is no, on all of them."""

BUILD_TIMEOUT = timedelta(minutes=30)
"""The same for a vote that follows a compilation."""


class Verdict(NamedTuple):
    """What a vote came to.

    Attributes:
        problem: why not; None for a yes.
        complete: whether all ranks had voted.
    """

    problem: str | None
    complete: bool


def agree(
    group: ProcessGroup, topic: str, facts: Mapping[str, object], problem: str | None, timeout: timedelta = VOTE_TIMEOUT
) -> str | None:
    """Whether every rank of the group can go on and brings equal facts: None, or why not, the same on all ranks.

    Args:
        group: the voters.
        topic: what is voted on; unique for this group.
        facts: what must be equal on all ranks, JSON-serialisable.
        problem: why this rank cannot go on; None if it can.
        timeout: the longest wait.
    """
    store = group.get_group_store()
    prefix = f"custom_ops/{topic}"
    keys = [f"{prefix}/{rank}" for rank in range(group.size())]
    store.set(keys[group.rank()], json.dumps({"facts": dict(facts), "problem": problem}))
    mine = _tally(store, keys, timeout)
    decided = Verdict(*json.loads(store.compare_set(f"{prefix}/verdict", "", json.dumps(mine))))
    if store.add(f"{prefix}/read", 1) == group.size() and decided.complete:
        _tidy(store, [*keys, f"{prefix}/read", f"{prefix}/verdict"])
    return decided.problem


def _tally(store: Store, keys: list[str], timeout: timedelta) -> Verdict:
    try:
        store.wait(keys, timeout)
    except RuntimeError:  # DistStoreError from most stores, a plain RuntimeError from FileStore
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return Verdict(f"rank {absent} of the group did not vote within {timeout}", complete=False)
    return Verdict(_problem([json.loads(store.get(key)) for key in keys]), complete=True)


def _problem(ballots: list[dict[str, Any]]) -> str | None:
    """What the first rank with a problem says, or the first fact that differs; None if there is neither."""
    for rank, ballot in enumerate(ballots):
        if ballot["problem"]:
            return f"rank {rank} of the group: {ballot['problem']}"
    for name, value in ballots[0]["facts"].items():
        for rank, ballot in enumerate(ballots):
            if ballot["facts"].get(name) != value:
                return f"{name} differs: {value!r} on rank 0, {ballot['facts'].get(name)!r} on rank {rank} of the group"
    return None


def _tidy(store: Store, keys: list[str]) -> None:
    # Not every store can delete; then the next group on it must bring its own.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        for key in keys:
            store.delete_key(key)
