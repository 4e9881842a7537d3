"""A tuning profile is read back as it was written, and nothing else is let in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from custom_ops import domain, limits, profile
from custom_ops.limits import Limits
from tests.support import profiles


def test_what_is_written_is_read_back() -> None:
    tuned = profiles.profile()
    assert profile.parse(tuned.to_json()) == tuned
    source = "NVIDIA H200, 2 ranks, 2026-11-30"
    assert tuned.limits == Limits(1 << 20, 1 << 22, source, 1 << 16, (profiles.ROW,))
    assert len(tuned.to_json().splitlines()) == 15, "a line for each key and each measured size"


def test_digest_differs_where_anything_does() -> None:
    assert profiles.profile().digest == profiles.profile().digest
    other = (profiles.ROW._replace(overlap_bytes=0),)
    assert profiles.profile(crossovers=other).digest != profiles.profile().digest
    assert profiles.profile(points=()).digest != profiles.profile().digest


WHOLE = json.loads(profiles.profile().to_json())
POINT, ROW = WHOLE["points"][0], WHOLE["crossovers"][0]


def rows(*changes: dict[str, Any]) -> dict[str, Any]:
    return {"crossovers": [{**ROW, **change} for change in changes]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"format": 2}, "'format' must be 1"),
    ({"format": None}, "'format' must be 1"),
    ({"colour": 1}, r"unknown \['colour'\]; allowed are"),
    ({"date": None}, r"\['date'\] missing"),
    ({"date": "30.11.2026"}, "date is '30.11.2026', must be a day as YYYY-MM-DD"),
    ({"device": ""}, "device is '', must be text"),
    ({"device": "a\nb"}, "must be text"),
    ({"torch": 2.11}, "torch is 2.11, must be text"),
    ({"world_size": 3}, r"world_size is 3, must be one of \(2, 4, 8, 16\)"),
    ({"world_size": True}, "world_size is True"),
    ({"world_size": 2.0}, "world_size is 2.0"),
    ({"strategies_equal": 1}, "strategies_equal is 1, must be true or false"),
    (rows({"one_shot_bytes": -1}), "one_shot_bytes is -1, must be a number of bytes"),
    (rows({"one_shot_bytes": 1e6}), "one_shot_bytes is 1000000.0"),
    (rows({"two_shot_bytes": 1 << 40}), "two_shot_bytes is 1099511627776"),
    (rows({"two_shot_bytes": domain.max_capacity(2) + 1}), "must rise and be at most"),
    (rows({"one_shot_bytes": 1 << 23}), "must rise and be at most"),
    (rows({"overlap_bytes": 1 << 23}), "is above two_shot_bytes"),
    (rows(), "must be of rising hidden sizes, at least one; they are \\[\\]"),
    (rows({}, {}), "must be of rising hidden sizes"),
    (rows({}, {"hidden": 64}), r"they are \[4096, 64\]"),
    (rows({"colour": 1}), r"crossovers\[0\]: unknown \['colour'\]"),
    ({"crossovers": None}, "'crossovers' must be a list"),
    ({"strategies_equal": False}, "did not give the same bits, so only one of them may be used"),
    ({"points": {}}, "'points' must be a list"),
    ({"points": [1]}, r"points\[0\]: must be an object, is int"),
    ({"points": [{**POINT, "tokens": 0}]}, r"points\[0\]: tokens is 0, must be a whole number"),
    ({"points": [{**POINT, "hidden": 1 << 30}]}, r"points\[0\]: hidden is"),
    ({"points": [{**POINT, "dtype": "os.system"}]}, "dtype is 'os.system', must be one of"),
    ({"points": [{**POINT, "unfused": None}]}, "unfused is None"),
    ({"points": [{**POINT, "one_shot": 0}]}, "one_shot is 0, must be microseconds above 0"),
    ({"points": [{**POINT, "one_shot": 1e9}]}, "one_shot is 1000000000.0"),
    ({"points": [{**POINT, "more": 1}]}, r"points\[0\]: unknown \['more'\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_value_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile.parse(json.dumps(profiles.as_object(**change)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "must be an object, is list"),
        ('{"format": 1, "format": 1}', "a key appears twice"),
        ('{"format": NaN}', "NaN is no number"),
        ('{"format": Infinity}', "Infinity is no number"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        (" " * (profile.LARGEST_TEXT + 1), "at most 1048576 are read"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile.parse(text)


@pytest.mark.parametrize("strategies", [(0, 1 << 20), (1 << 20, 1 << 20), (0, 0)])
def test_one_strategy_alone_need_not_equal_the_other(strategies: tuple[int, int]) -> None:
    one_shot, two_shot = strategies
    change = rows({"one_shot_bytes": one_shot, "two_shot_bytes": two_shot, "overlap_bytes": 0})
    tuned = profile.parse(json.dumps(profiles.as_object(strategies_equal=False, **change)))
    assert tuned.limits.two_shot_bytes == two_shot


def test_profile_of_another_machine_is_refused() -> None:
    tuned = profiles.profile()
    assert tuned.refusal("NVIDIA H200", "2.11.0+cpu", "0.7.4") is None
    for machine, message in (
        (("NVIDIA B200", "2.11.0", "0.7.4"), "measured with device 'NVIDIA H200', here is 'NVIDIA B200'"),
        (("NVIDIA H200", "2.12.0", "0.7.4"), "with torch '2.11.0\\+cu130', here is '2.12.0'"),
        (("NVIDIA H200", "2.11.0", "0.7.4.post1"), "with flashinfer '0.7.4', here is '0.7.4.post1'"),
        (("NVIDIA H200", "2.11.0", None), "with flashinfer '0.7.4', here is None"),
    ):
        refusal = tuned.refusal(*machine)
        assert refusal is not None
        assert re.search(message, refusal), refusal
        assert "fusion_passes tune" in refusal


def test_shipped_profiles_are_valid_and_named_after_what_they_are() -> None:
    files = sorted((Path(profile.__file__).parent / "profiles").glob("*.json"))
    assert files
    for file in files:
        tuned = profile.parse(file.read_text())
        assert file.stem == f"{tuned.device.lower().replace(' ', '_')}_{tuned.world_size}"
        assert file.read_text() == tuned.to_json()
        assert tuned.points
        assert limits.measured()[tuned.device, tuned.world_size] == tuned.limits
