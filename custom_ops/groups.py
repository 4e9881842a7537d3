"""Process groups by name: exactly the group of the collective, never another one."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group


def resolve(group_name: str | None, world_size: int | None = None) -> ProcessGroup:
    """The process group of a name (None: the default group), checked against the size that the caller expects.

    Raises:
        ValueError: no process group, an unknown name, or a group of another size.
    """
    if not dist.is_initialized():
        raise ValueError(
            f"group_name={group_name!r}: torch.distributed is not initialised; call init_process_group first"
        )
    group = _lookup(group_name)
    if world_size is not None and group.size() != world_size:
        raise ValueError(
            f"world_size={world_size}: group {group.group_name!r} has {group.size()} ranks; pass its size or its name"
        )
    return group


def _lookup(group_name: str | None) -> ProcessGroup:
    if group_name is None:
        world = dist.group.WORLD
        assert world is not None
        return world
    try:
        return _resolve_process_group(group_name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, LookupError) as error:
        raise ValueError(
            f"group_name={group_name!r}: no such process group on this rank; pass ProcessGroup.group_name of a live one"
        ) from error
