"""The debug switch: before each call, all ranks compare what they are about to do, and all raise where they differ.

A rank that brings another number of tokens, or calls something else, would leave the kernel of its peers spinning.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from datetime import timedelta

from torch.distributed import ProcessGroup

from custom_ops import consensus, limits, workspace
from custom_ops.ready import Tensors

TIMEOUT = timedelta(minutes=1)
"""How long a rank waits for the same call on the others."""

_CALLS: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The registry: how many calls of a group were compared."""


def require_equal(group: ProcessGroup, op: str, tensors: Tensors, flags: tuple[Hashable, ...]) -> None:
    """Compare a call with that of every other rank of the group; nothing runs on a device.

    Raises:
        RuntimeError: ranks differ, or one did not come in time; on all ranks that came.
    """
    number = _CALLS[group] = _CALLS.get(group, 0) + 1
    problem = consensus.agree(group, f"check/{number}", _facts(group, op, tensors, flags), None, TIMEOUT)
    if problem is not None:
        raise RuntimeError(f"check_ranks: call {number} on process group {group.group_name!r}: {problem}")


def _facts(group: ProcessGroup, op: str, tensors: Tensors, flags: tuple[Hashable, ...]) -> dict[str, object]:
    facts: dict[str, object] = {"op": op}
    for name, tensor in zip(Tensors._fields, tensors, strict=True):
        shown = None if tensor is None else [list(tensor.shape), str(tensor.dtype), tensor.device.type]
        facts[name] = shown
    facts["flags"] = [
        flag if flag is None or isinstance(flag, bool | int | float | str) else str(flag) for flag in flags
    ]
    state, x = workspace.known_state(group), tensors.allreduce_in
    if state is not None and x.dim():
        hidden = x.shape[-1]
        tokens = x.numel() // hidden if hidden else 0
        facts["strategy"] = limits.choose(state.limits, tokens, hidden, x.dtype.itemsize, group.size()).value
    return facts
