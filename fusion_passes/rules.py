"""The rules: which site becomes which pattern of the fused op. One table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One way to serve a site.

    Attributes:
        name: what the report calls it.
        residual: whether the site adds a residual.
        pattern_code: FlashInfer's pattern, one of custom_ops.pattern_codes.PATTERNS.
    """

    name: str
    residual: bool
    pattern_code: int


RULES = (
    Rule("norm", residual=False, pattern_code=1),
    Rule("add_norm", residual=True, pattern_code=1),
)
"""Every rule; the first that fits a site serves it."""


def pick(residual: bool) -> Rule:
    """The rule of a site that adds a residual, or of one that does not."""
    return next(rule for rule in RULES if rule.residual == residual)
