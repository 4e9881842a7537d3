"""FlashInfer's implementations of the kernel, and how they differ. One table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Backend:
    """One implementation.

    Attributes:
        name: FlashInfer's name.
        patterns: codes that it serves.
        one_host: whether all ranks must be on one host; otherwise one NVLink domain suffices.
        chooses_strategy: whether it chooses between one-shot and two-shot itself.
    """

    name: str
    patterns: frozenset[int]
    one_host: bool
    chooses_strategy: bool


DEFAULT = "trtllm"

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend(DEFAULT, frozenset({0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 13, 14}), one_host=True, chooses_strategy=False),
        # Needs NVLink multicast. It ignores the trigger, so that is late, and has no per-group FP8.
        Backend("mnnvl", frozenset({0, 1, 2, 3, 4, 5, 10, 11, 13, 14}), one_host=False, chooses_strategy=True),
    )
}
"""By name."""


def find(name: str | None) -> Backend:
    """The backend of a name; None for the default.

    Raises:
        ValueError: there is none.
    """
    found = BACKENDS.get(DEFAULT if name is None else name)
    if found is None:
        raise ValueError(f"backend={name!r}: must be one of {', '.join(map(repr, BACKENDS))}")
    return found
