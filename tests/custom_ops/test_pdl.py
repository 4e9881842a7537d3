"""The truth table of docs/pdl.md."""

from __future__ import annotations

import pytest

import custom_ops
from custom_ops import pdl
from custom_ops.limits import Strategy

NEW, OLD = "0.7.4", "0.7.1"


def test_threshold_is_sixteen_tokens() -> None:
    assert custom_ops.PDL_ADVANCE_LAUNCH_TOKENS == 16


@pytest.mark.parametrize(
    ("tokens", "strategy", "threshold", "version", "at_end"),
    [
        (1, Strategy.ONE_SHOT, 16, NEW, False),
        (16, Strategy.ONE_SHOT, 16, NEW, False),
        (17, Strategy.ONE_SHOT, 16, NEW, True),
        (16, Strategy.TWO_SHOT, 16, NEW, True),
        (16, Strategy.UNFUSED, 16, NEW, True),
        (1, Strategy.ONE_SHOT, 0, NEW, True),
        (64, Strategy.ONE_SHOT, 64, NEW, False),
        (1, Strategy.ONE_SHOT, 16, OLD, True),
        (1, Strategy.ONE_SHOT, 16, None, True),
        (1, Strategy.ONE_SHOT, 16, "0.7.2", False),
        (1, Strategy.ONE_SHOT, 16, "0.7.2.post1", False),
        (1, Strategy.ONE_SHOT, 16, "0.7.2rc1", True),
        (1, Strategy.ONE_SHOT, 16, "0.10.0", False),
    ],
)
def test_trigger(tokens: int, strategy: Strategy, threshold: int, version: str | None, at_end: bool) -> None:
    assert pdl.completion_at_end(tokens, strategy, threshold, version) is at_end


@pytest.mark.parametrize(
    ("requested", "version", "effective"),
    [(True, NEW, True), (False, NEW, False), (True, OLD, False), (True, None, False), (False, OLD, False)],
)
def test_launch(requested: bool, version: str | None, effective: bool) -> None:
    assert pdl.launch_with_pdl(requested, version) is effective
