"""FlashInfer's fusion patterns that the op serves: one row each, by FlashInfer's own code."""

from __future__ import annotations

from dataclasses import dataclass

from custom_ops.formats import FORMATS


@dataclass(frozen=True)
class Pattern:
    """What one pattern reads and writes.

    Attributes:
        code: FlashInfer's `AllReduceFusionPattern`.
        name: what it computes.
        inputs: optional tensor arguments that it takes; the others must be None.
        outputs: output arguments that it writes; all must be given, the others must be None.
        format: name of the quantised format of quant_out, one of formats.FORMATS; None where there is none.
    """

    code: int
    name: str
    inputs: frozenset[str]
    outputs: frozenset[str]
    format: str | None = None


def _quantised(code: int, code_with_norm: int, name: str) -> tuple[Pattern, Pattern]:
    """The two patterns of a format: the norm itself is not written, or it is."""
    row = FORMATS[name]
    inputs = {"residual", "rms_gamma"} | ({"scale_factor"} if row.takes_scale else set())
    outputs = {"residual_out", "quant_out"} | ({"scale_out"} if row.scales else set())
    title = f"all-reduce, add, RMSNorm, {row.title}"
    return (
        Pattern(code, title, frozenset(inputs), frozenset(outputs), name),
        Pattern(code_with_norm, f"{title}, norm too", frozenset(inputs), frozenset(outputs | {"norm_out"}), name),
    )


PATTERNS: dict[int, Pattern] = {
    row.code: row
    for row in (
        Pattern(0, "all-reduce", frozenset({"residual"}), frozenset({"residual_out"})),
        Pattern(
            1, "all-reduce, add, RMSNorm", frozenset({"residual", "rms_gamma"}), frozenset({"residual_out", "norm_out"})
        ),
        *_quantised(2, 4, "fp8"),
        *_quantised(3, 5, "nvfp4"),
        *_quantised(8, 9, "fp8_group"),
        *_quantised(10, 11, "fp8_token"),
        *_quantised(13, 14, "mxfp8"),
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


def find(format: str | None, norm_out: bool) -> Pattern:
    """The pattern that writes a format (None: no quantised values), and the norm or not."""
    wanted = (format, norm_out)
    return next(row for row in PATTERNS.values() if row.code and (row.format, "norm_out" in row.outputs) == wanted)
