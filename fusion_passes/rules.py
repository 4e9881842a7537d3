"""The rules: which site becomes which pattern of the fused op. One table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """One way to serve a site.

    Attributes:
        name: what the report calls it.
        residual: whether the site adds a residual.
        folded: whether something is taken before the sum that the model takes after it.
        pattern_code: FlashInfer's pattern, one of custom_ops.pattern_codes.PATTERNS.
    """

    name: str
    residual: bool
    folded: bool
    pattern_code: int


RULES = (
    Rule("norm", residual=False, folded=False, pattern_code=1),
    Rule("add_norm", residual=True, folded=False, pattern_code=1),
    Rule("folded_norm", residual=False, folded=True, pattern_code=1),
    Rule("folded_add_norm", residual=True, folded=True, pattern_code=1),
)
"""Every rule; the first that fits a site serves it."""


def pick(residual: bool, folded: bool = False) -> Rule:
    """The rule of a site, by whether it adds a residual and folds something into its inputs."""
    return next(rule for rule in RULES if (rule.residual, rule.folded) == (residual, folded))
