"""One tuning profile for all ranks: the first rank's, handed out through the key-value store."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from custom_ops import flashinfer_adapter, limits, machine, profile, workspace
from custom_ops.profile import Profile

TIMEOUT = timedelta(minutes=2)
"""How long a rank waits for the first rank to read its file."""

_KEY = "custom_ops/tuning_profile"


def use_profile(path: str | Path) -> Profile:
    """Let a tuning profile decide which sizes run fused, in this process from now on, and return it.

    With a process group, all ranks call this; the file of rank 0 of the default group is read, and serves all. On a
    machine without CUDA the profile is read and decides nothing.

    Args:
        path: JSON file that `python -m fusion_passes tune` wrote.

    Raises:
        ValueError: no such file, no valid profile, one of another device or version, or a second one in one process.
    """
    found = _agreed(Path(path))
    if torch.cuda.is_available():
        device = machine.name(machine.default_device())
        refusal = found.refusal(device, str(torch.__version__), flashinfer_adapter.version())
        if refusal:
            raise ValueError(f"tuning profile {str(path)!r}: {refusal}")
        limits.adopt(device, found.world_size, found.limits)
        workspace.limit_to(found.world_size, found.limits)
    return found


def _agreed(path: Path) -> Profile:
    """The profile of a file, or with a process group that of the first rank's file."""
    # The ranks of a made-up group have no store to share, and nobody to agree with.
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return profile.parse(_read(path))
    world = dist.group.WORLD
    assert world is not None
    store = world.get_group_store()
    if dist.get_rank() == 0:
        answer = {}
        try:
            answer["text"] = profile.parse(_read(path)).to_json()
        except ValueError as error:
            answer["problem"] = str(error)
        mine = json.dumps(answer)
        # What is written stays: a rank that reads later must not find another one.
        if store.compare_set(_KEY, "", mine).decode() != mine:
            raise ValueError(f"tuning profile {str(path)!r}: this process group uses another one; use one for all")
    try:
        store.wait([_KEY], TIMEOUT)
    except RuntimeError:
        raise ValueError(
            f"tuning profile {str(path)!r}: rank 0 uses none (waited {TIMEOUT}); all ranks must ask for it"
        ) from None
    answer = json.loads(store.get(_KEY))
    if "problem" in answer:
        raise ValueError(answer["problem"])
    return profile.parse(answer["text"])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"tuning profile {str(path)!r}: cannot be read ({error})") from error
