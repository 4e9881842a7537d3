"""The rules: which site becomes which pattern of the fused op. One table, of norms times formats."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from custom_ops import pattern_codes
from custom_ops.formats import FORMATS


@dataclass(frozen=True)
class Norms:
    """What a site does up to its norm."""

    name: str
    residual: bool
    folded: bool


NORMS = (
    Norms("norm", residual=False, folded=False),
    Norms("add_norm", residual=True, folded=False),
    Norms("folded_norm", residual=False, folded=True),
    Norms("folded_add_norm", residual=True, folded=True),
)


@dataclass(frozen=True)
class Rule:
    """One way to serve a site.

    Attributes:
        name: what the report calls it: the norm, the format, and "out" where the norm is written beside it.
        residual: whether the site adds a residual.
        folded: whether something is taken before the sum that the model takes after it.
        format: name of the quantised format; None where nothing is quantised.
        norm_out: whether the norm is written.
        pattern_code: FlashInfer's pattern, one of custom_ops.pattern_codes.PATTERNS.
    """

    name: str
    residual: bool
    folded: bool
    format: str | None
    norm_out: bool
    pattern_code: int


def _rule(norms: Norms, format: str | None, norm_out: bool) -> Rule:
    parts = [norms.name, *([format] if format else []), *(["out"] if format and norm_out else [])]
    code = pattern_codes.find(format, norm_out).code
    return Rule("_".join(parts), norms.residual, norms.folded, format, norm_out, code)


_OUTPUTS: tuple[tuple[str | None, bool], ...] = ((None, True), *product(FORMATS, (False, True)))
RULES = tuple(_rule(norms, format, norm_out) for norms, (format, norm_out) in product(NORMS, _OUTPUTS))
"""Every rule; a site fits exactly one."""


def pick(residual: bool, folded: bool = False, format: str | None = None, norm_out: bool = True) -> Rule:
    """The rule of a site: whether it adds a residual and folds something into its inputs, and what it needs written."""
    wanted = (residual, folded, format, norm_out)
    return next(rule for rule in RULES if (rule.residual, rule.folded, rule.format, rule.norm_out) == wanted)
