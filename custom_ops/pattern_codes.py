"""FlashInfer's fusion patterns that the op serves: one row each, by FlashInfer's own code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pattern:
    """What one pattern reads and writes.

    Attributes:
        code: FlashInfer's `AllReduceFusionPattern`.
        name: what it computes.
        inputs: optional tensor arguments that it takes; the others must be None.
        outputs: output arguments that it writes; all must be given, the others must be None.
    """

    code: int
    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]


PATTERNS: dict[int, Pattern] = {
    row.code: row
    for row in (
        Pattern(0, "all-reduce", frozenset({"residual"}), frozenset({"residual_out"})),
        Pattern(
            1, "all-reduce, add, RMSNorm", frozenset({"residual", "rms_gamma"}), frozenset({"residual_out", "norm_out"})
        ),
    )
}


def lookup(code: int) -> Pattern:
    """The row of a pattern code.

    Raises:
        ValueError: no such row.
    """
    if code not in PATTERNS:
        known = ", ".join(f"{row.code} ({row.name})" for row in PATTERNS.values())
        raise ValueError(f"pattern_code={code}: not a pattern of this op; use one of {known}")
    return PATTERNS[code]
