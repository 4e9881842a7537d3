"""Tuning profiles that nobody measured."""

from __future__ import annotations

import json
from typing import Any

from custom_ops.limits import Row
from custom_ops.profile import Measurement, Profile

ROW = Row(4096, 1 << 20, 1 << 22, 1 << 16)
POINT = Measurement(16, 4096, "bfloat16", 5.0, 9.0, 4.9, 11.0)


def profile(**changes: Any) -> Profile:
    """A profile of two H200 with one measured size."""
    values: dict[str, Any] = {
        "device": "NVIDIA H200", "world_size": 2, "torch": "2.11.0+cu130", "flashinfer": "0.7.4", "date": "2026-11-30",
        "strategies_equal": True, "crossovers": (ROW,), "points": (POINT,),
    }  # fmt: skip
    return Profile(**{**values, **changes})


def as_object(**changes: Any) -> dict[str, Any]:
    """Its JSON object, changed; a change to None takes the key out."""
    found = {**json.loads(profile().to_json()), **changes}
    return {key: value for key, value in found.items() if value is not None}
