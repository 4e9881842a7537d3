"""The one decision, in bytes, and its table."""

from __future__ import annotations

import logging

import pytest

from custom_ops import limits
from custom_ops.limits import MIB, Limits, Row, Strategy, choose

ONE, TWO, UNFUSED = Strategy.ONE_SHOT, Strategy.TWO_SHOT, Strategy.UNFUSED
BOTH = Limits(1 * MIB, 4 * MIB, "test")


@pytest.mark.parametrize(
    ("tokens", "strategy"),
    [(1, ONE), (128, ONE), (129, TWO), (512, TWO), (513, UNFUSED), (10**9, UNFUSED), (0, ONE)],
)
def test_limit_and_limit_plus_one(tokens: int, strategy: Strategy) -> None:
    assert choose(BOTH, tokens, hidden=4096, itemsize=2, world_size=2) is strategy


@pytest.mark.parametrize(("tokens", "strategy"), [(1, UNFUSED), (2, UNFUSED), (3, TWO)])
def test_two_shot_needs_more_tokens_than_ranks(tokens: int, strategy: Strategy) -> None:
    only_two_shot = Limits(0, 64 * MIB, "test")
    assert choose(only_two_shot, tokens, hidden=4096, itemsize=2, world_size=2) is strategy


ROWS = Limits(1, 1, "test", 1, (Row(1024, 1 << 20, 2 << 20, 1 << 10), Row(4096, 4 << 20, 8 << 20, 0)))


@pytest.mark.parametrize(
    ("hidden", "one_shot", "two_shot", "overlap"),
    [
        (1024, 1 << 20, 2 << 20, 1 << 10), (4095, 1 << 20, 2 << 20, 1 << 10), (4096, 4 << 20, 8 << 20, 0),
        (16384, 4 << 20, 8 << 20, 0), (512, 1 << 19, 1 << 20, 1 << 9),
    ],
)  # fmt: skip
def test_a_hidden_size_has_the_limits_of_the_next_smaller_one(
    hidden: int, one_shot: int, two_shot: int, overlap: int
) -> None:
    assert ROWS.at(hidden) == Limits(one_shot, two_shot, "test", overlap)
    assert choose(ROWS, one_shot // (hidden * 2), hidden, 2, 2) is ONE
    assert choose(ROWS, one_shot // (hidden * 2) + 1, hidden, 2, 2) is TWO
    assert choose(ROWS, two_shot // (hidden * 2) + 1, hidden, 2, 2) is UNFUSED


def test_without_rows_all_hidden_sizes_are_one() -> None:
    assert BOTH.at(64) is BOTH


def test_counts_bytes_beyond_32_bits() -> None:
    assert choose(Limits(1 << 40, 1 << 40, "test"), 8192 * 1024, 8192, 4, 4) is ONE
    assert choose(BOTH, 8192 * 1024, 8192, 4, 4) is UNFUSED


def test_measured_device_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    assert limits.for_device("NVIDIA H200", 2) == limits.measured()["NVIDIA H200", 2]
    assert not caplog.records


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_unknown_device_gets_a_default_and_one_warning(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    limits._known.cache_clear()
    with caplog.at_level(logging.WARNING, "custom_ops"):
        for _ in range(3):
            assert limits.for_device("NVIDIA GB999", world_size) is limits.DEFAULTS[world_size]
    assert len(caplog.records) == 1
    assert "GB999" in caplog.text


@pytest.mark.parametrize("world_size", [1, 3, 32])
def test_no_kernel_no_limits(world_size: int) -> None:
    assert limits.for_device("NVIDIA H200", world_size) is limits.NONE


def test_every_row_says_where_it_comes_from_and_is_within_the_kernel() -> None:
    from custom_ops import domain

    for (device, world_size), row in limits.measured().items():
        assert all(max(one[1:]) <= domain.max_capacity(world_size) for one in row.rows)
        assert row.source.startswith(f"{device}, {world_size} ranks, 20")
    rows = [(size, row) for (_, size), row in limits.measured().items()] + list(limits.DEFAULTS.items())
    for world_size, row in rows:
        assert max(row.one_shot_bytes, row.two_shot_bytes) <= domain.max_capacity(world_size)
