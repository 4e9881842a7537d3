"""How calls ran: fused or unfused, with which flags, and why."""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.limits import Strategy


@dataclass(frozen=True)
class Launch:
    """The resolved plan of a call: what was asked for, after every rule was applied.

    Attributes:
        op: name of the op.
        device: "cuda" or "cpu".
        pattern_code: FlashInfer's pattern.
        strategy: one-shot, two-shot, unfused, or as the backend chooses.
        launch_with_pdl: effective flag; False when unfused.
        completion_at_end: effective trigger; True (late) when unfused.
        reason: why the call ran unfused; "" when fused.
        copied_input: an input could not be viewed as contiguous [tokens, hidden] and was copied.
    """

    op: str
    device: str
    pattern_code: int
    strategy: Strategy
    launch_with_pdl: bool = False
    completion_at_end: bool = True
    reason: str = ""
    copied_input: bool = False

    @property
    def one_shot(self) -> bool | None:
        """The strategy as FlashInfer takes it: None where its backend chooses."""
        return None if self.strategy is Strategy.BACKEND else self.strategy is Strategy.ONE_SHOT


@dataclass
class Count:
    """How often a plan ran."""

    value: int = 0


_LAUNCHES: dict[Launch, Count] = {}
"""The registry: plan -> number of calls. Replays of a captured graph do not pass here; its capture counts once."""


def count_of(launch: Launch) -> Count:
    """Where the calls of a plan are counted; it stays the same through reset_launches()."""
    return _LAUNCHES.setdefault(launch, Count())


def record(launch: Launch) -> None:
    """Count one call."""
    count_of(launch).value += 1


def launches() -> dict[Launch, int]:
    """How many calls ran with each plan since reset_launches()."""
    return {launch: count.value for launch, count in _LAUNCHES.items() if count.value}


def reset_launches() -> None:
    """Forget all counts."""
    for count in _LAUNCHES.values():
        count.value = 0
