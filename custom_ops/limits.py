"""The one decision one-shot / two-shot / unfused, in bytes of the message, per device and world size.

One-shot pushes the whole message to every peer: fewest steps, most traffic. Two-shot reduces a share each and gathers:
two barriers, less traffic. Above both limits the process group's own all-reduce is as fast, so the op goes unfused.
A decision depends only on numbers that are equal on all ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("custom_ops")

MIB = 1 << 20


class Strategy(str, Enum):
    """How one call runs."""

    ONE_SHOT = "one_shot"
    TWO_SHOT = "two_shot"
    UNFUSED = "unfused"
    BACKEND = "backend"
    """One-shot or two-shot, as FlashInfer's backend chooses."""


class Row(NamedTuple):
    """Largest message, in bytes, that each strategy serves at one hidden size.

    Attributes:
        hidden: the hidden size.
        one_shot_bytes: one-shot up to here.
        two_shot_bytes: two-shot from there up to here, for more tokens than ranks.
        overlap_bytes: up to here the all-reduce alone and Inductor's kernel are faster than the fused op.
    """

    hidden: int
    one_shot_bytes: int
    two_shot_bytes: int
    overlap_bytes: int


@dataclass(frozen=True)
class Limits:
    """Largest message, in bytes (tokens x hidden x itemsize), that each strategy serves.

    Attributes:
        one_shot_bytes: one-shot up to here.
        two_shot_bytes: two-shot from there up to here, for more tokens than ranks.
        source: where the numbers come from: device, world size and date, or "default".
        overlap_bytes: up to here the all-reduce alone and Inductor's kernel are faster than the fused op.
        rows: the same by hidden size, in its order; they go before the numbers above. What pays depends on it: a row
            is normed by one cluster of blocks, which a short row does not keep busy.
    """

    one_shot_bytes: int
    two_shot_bytes: int
    source: str
    overlap_bytes: int = 0
    rows: tuple[Row, ...] = ()

    def at(self, hidden: int) -> Limits:
        """The limits of one hidden size: those of the next smaller one that was measured.

        Below the smallest that was measured, as many tokens as there.
        """
        if not self.rows:
            return self
        row = next((row for row in reversed(self.rows) if row.hidden <= hidden), None)
        if row is None:
            first = self.rows[0]
            row = Row(hidden, *(nbytes * hidden // first.hidden for nbytes in first[1:]))
        return Limits(row.one_shot_bytes, row.two_shot_bytes, self.source, row.overlap_bytes)


DEFAULTS: dict[int, Limits] = {
    # An eighth to a quarter of the sizes up to which FlashInfer's own heuristic stays with one-shot.
    2: Limits(16 * MIB, 16 * MIB, "default"),
    4: Limits(2 * MIB, 2 * MIB, "default"),
    8: Limits(MIB // 2, MIB // 2, "default"),
    16: Limits(MIB // 4, MIB // 4, "default"),
}
"""Conservative limits by world size, for devices that nobody has measured."""

NONE = Limits(0, 0, "nothing runs fused")


ADOPTED: dict[tuple[str, int], Limits] = {}
"""The registry of what a tuning profile said, by (device name, world size); it goes before everything else."""


def adopt(device_name: str, world_size: int, found: Limits) -> None:
    """Let these limits decide for a device and world size, in this process from now on.

    Raises:
        ValueError: others were adopted before: their calls may be captured, or be compiled on another rank.
    """
    before = ADOPTED.setdefault((device_name, world_size), found)
    if before != found:
        raise ValueError(
            f"two tuning profiles for {world_size} ranks of {device_name!r} in one process: {before} and {found}; "
            "use one, in a new process"
        )


def for_device(device_name: str, world_size: int) -> Limits:
    """Limits of a device and world size: adopted, measured, or conservative with one warning."""
    return ADOPTED.get((device_name, world_size)) or _known(device_name, world_size)


@cache
def _known(device_name: str, world_size: int) -> Limits:
    if found := measured().get((device_name, world_size)):
        return found
    fallback = DEFAULTS.get(world_size, NONE)
    if fallback is not NONE:
        logger.warning(
            "no measured limits for %d ranks of %r: fusing up to %.2f MiB per all-reduce, a conservative default; "
            "`python -m fusion_passes tune` measures",
            world_size,
            device_name,
            fallback.two_shot_bytes / MIB,
        )
    return fallback


@cache
def measured() -> dict[tuple[str, int], Limits]:
    """Limits by (device name, world size) from the profiles that lie beside this module."""
    from custom_ops import profile

    files = (Path(__file__).parent / "profiles").glob("*.json")
    profiles = [profile.parse(file.read_text()) for file in sorted(files)]
    return {(one.device, one.world_size): one.limits for one in profiles}


def choose(limits: Limits, num_tokens: int, hidden: int, itemsize: int, world_size: int) -> Strategy:
    """The strategy for a message of [num_tokens, hidden] elements of itemsize bytes between world_size ranks."""
    nbytes, limits = num_tokens * hidden * itemsize, limits.at(hidden)
    if nbytes <= limits.one_shot_bytes:
        return Strategy.ONE_SHOT
    # The two-shot kernel gives every rank at least one token and asserts that there is one more.
    if nbytes <= limits.two_shot_bytes and num_tokens > world_size:
        return Strategy.TWO_SHOT
    return Strategy.UNFUSED
