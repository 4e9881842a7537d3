"""A tuning profile: what was measured on one kind of machine, and up to which sizes what was fastest.

A profile is JSON that a person may read and edit, and a process must be able to trust: it is parsed strictly, and
nothing that is unknown, missing or absurd is let through.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from typing import Any

import torch

from custom_ops import domain
from custom_ops.limits import Limits, Row

FORMAT = 1
LARGEST_TEXT = 1 << 20
LARGEST_SIZE = 1 << 24
LONGEST_US = 1e7
DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in domain.DTYPES)


@dataclass(frozen=True)
class Measurement:
    """One size, in microseconds a call.

    Attributes:
        tokens: rows.
        hidden: elements of a row.
        dtype: type of the activations, such as "bfloat16".
        one_shot: the fused op, one-shot; None where it cannot serve.
        two_shot: likewise.
        overlap: FlashInfer's all-reduce alone, then Inductor's kernel; None where it cannot serve.
        unfused: the process group's all-reduce, then Inductor's kernel.
    """

    tokens: int
    hidden: int
    dtype: str
    one_shot: float | None
    two_shot: float | None
    overlap: float | None
    unfused: float

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return self.tokens * self.hidden * int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class Profile:
    """Everything `python -m fusion_passes tune` finds out.

    Attributes:
        device: name of the CUDA device.
        world_size: ranks of the group.
        torch: version of torch.
        flashinfer: version of flashinfer-python.
        date: day of the measurement, YYYY-MM-DD.
        strategies_equal: whether one-shot and two-shot gave the same bits; otherwise only one of them may be used.
        crossovers: for each hidden size, in its order, up to which message each strategy is the fastest.
        points: what was measured.
    """

    device: str
    world_size: int
    torch: str
    flashinfer: str
    date: str
    strategies_equal: bool
    crossovers: tuple[Row, ...]
    points: tuple[Measurement, ...]

    @property
    def limits(self) -> Limits:
        """What the ops decide by."""
        source = f"{self.device}, {self.world_size} ranks, {self.date}"
        least = (min(numbers) for numbers in list(zip(*self.crossovers, strict=True))[1:])
        one_shot, two_shot, overlap = least
        return Limits(one_shot, two_shot, source, overlap, self.crossovers)

    @property
    def digest(self) -> str:
        """The same for equal profiles only."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The profile as text, a line for each hidden size and each measured size."""
        head = {"format": FORMAT, **asdict(self)}
        lists = {"crossovers": [row._asdict() for row in self.crossovers], "points": head["points"]}
        shown = json.dumps({key: value for key, value in head.items() if key not in lists}, indent=1)
        for name, entries in lists.items():
            lines = ",\n  ".join(map(json.dumps, entries))
            shown = f'{shown.removesuffix(chr(10) + "}")},\n "{name}": [\n  {lines}\n ]\n}}'
        return f"{shown}\n"

    def refusal(self, device: str, torch_version: str, flashinfer_version: str | None) -> str | None:
        """Why the profile says nothing about a machine; None if it does. Builds of one release are the same."""
        found = {"device": device, "torch": torch_version, "flashinfer": flashinfer_version}
        mine = {"device": self.device, "torch": self.torch, "flashinfer": self.flashinfer}
        for name, value in found.items():
            equal = mine[name] == value if name == "device" else _release(mine[name]) == _release(value)
            if not equal:
                return (
                    f"it was measured with {name} {mine[name]!r}, here is {value!r}; run `python -m fusion_passes tune`"
                )
        return None


def parse(text: str) -> Profile:
    """A profile from its text.

    Raises:
        ValueError: it is none: what is wrong, and what is allowed.
    """
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"tuning profile of {len(text)} characters: at most {LARGEST_TEXT} are read")
    try:
        found = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("tuning profile: nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"tuning profile: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"tuning profile: must be an object, is {type(found).__name__}")
    if found.pop("format", None) != FORMAT:
        raise ValueError(f"tuning profile: 'format' must be {FORMAT}")
    for name, (kind, names) in _ENTRIES.items():
        entries = found.get(name)
        if not isinstance(entries, list):
            raise ValueError(f"tuning profile: {name!r} must be a list")
        found[name] = tuple(kind(**_checked(one, names, f"{name}[{at}]")) for at, one in enumerate(entries))
    return _consistent(Profile(**_checked(found, _names(Profile), "tuning profile")))


def _consistent(profile: Profile) -> Profile:
    hidden, most = [row.hidden for row in profile.crossovers], domain.max_capacity(profile.world_size)
    if not hidden or hidden != sorted(set(hidden)):
        raise ValueError(
            f"tuning profile: 'crossovers' must be of rising hidden sizes, at least one; they are {hidden}"
        )
    for row in profile.crossovers:
        where, one_shot, two_shot = f"tuning profile: hidden size {row.hidden}", row.one_shot_bytes, row.two_shot_bytes
        if not one_shot <= two_shot <= most:
            raise ValueError(
                f"{where}: one_shot_bytes={one_shot} and two_shot_bytes={two_shot} must rise and be at most {most}"
            )
        if row.overlap_bytes > two_shot:
            raise ValueError(f"{where}: overlap_bytes={row.overlap_bytes} is above two_shot_bytes={two_shot}")
        if not profile.strategies_equal and 0 < one_shot < two_shot:
            raise ValueError(
                f"{where}: one-shot and two-shot did not give the same bits, so only one of them may be used: "
                f"one_shot_bytes={one_shot} must be 0 or two_shot_bytes={two_shot}"
            )
    return profile


def _checked(found: object, names: Sequence[str], where: str) -> dict[str, Any]:
    """The values of an object with exactly these keys, each allowed."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}: must be an object, is {type(found).__name__}")
    if unknown := sorted(set(found) - set(names)):
        raise ValueError(f"{where}: unknown {unknown}; allowed are {list(names)}")
    if missing := sorted(set(names) - set(found)):
        raise ValueError(f"{where}: {missing} missing")
    for name, value in found.items():
        allowed, is_allowed = _ALLOWED[name]
        if not is_allowed(value):
            raise ValueError(f"{where}: {name} is {value!r:.80}, must be {allowed}")
    return found


def _is_whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= LONGEST_US


def _is_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 100 and value.isprintable()


def _is_date(value: object) -> bool:
    try:
        return isinstance(value, str) and date.fromisoformat(value).isoformat() == value
    except ValueError:
        return False


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


_ENTRIES: Mapping[str, tuple[type, Sequence[str]]] = {
    "crossovers": (Row, Row._fields),
    "points": (Measurement, _names(Measurement)),
}
"""The lists of a profile: what their entries are, with which keys."""

_TEXT = ("text of 1 to 100 characters", _is_text)
_BYTES = ("a number of bytes", lambda value: _is_whole(value, 0, domain.MAX_LAMPORT_BYTES))
_SIZE = (f"a whole number from 1 to {LARGEST_SIZE}", lambda value: _is_whole(value, 1, LARGEST_SIZE))
_TIME = (f"microseconds above 0, up to {LONGEST_US:g}", _is_time)
_OPTIONAL_TIME = (f"{_TIME[0]}, or null", lambda value: value is None or _is_time(value))

_ALLOWED: Mapping[str, tuple[str, Any]] = {
    "device": _TEXT,
    "torch": _TEXT,
    "flashinfer": _TEXT,
    "date": ("a day as YYYY-MM-DD", _is_date),
    "world_size": (f"one of {domain.WORLD_SIZES}", lambda value: type(value) is int and value in domain.WORLD_SIZES),
    "strategies_equal": ("true or false", lambda value: isinstance(value, bool)),
    "one_shot_bytes": _BYTES,
    "two_shot_bytes": _BYTES,
    "overlap_bytes": _BYTES,
    "crossovers": ("a list", lambda value: isinstance(value, tuple)),
    "points": ("a list", lambda value: isinstance(value, tuple)),
    "tokens": _SIZE,
    "hidden": _SIZE,
    "dtype": (f"one of {DTYPES}", lambda value: value in DTYPES),
    "one_shot": _OPTIONAL_TIME,
    "two_shot": _OPTIONAL_TIME,
    "overlap": _OPTIONAL_TIME,
    "unfused": _TIME,
}
"""What each key may hold: in words, and as a check."""


def _release(version: str | None) -> str | None:
    """A version without what says how it was built."""
    return version and version.partition("+")[0]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("tuning profile: a key appears twice in one object")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"tuning profile: {text} is no number")
