"""What the ranks of a group have agreed on, and the workspaces that they made."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from custom_ops import backends, flashinfer_adapter, limits
from custom_ops.limits import Limits


@dataclass(frozen=True)
class Workspace:
    """FlashInfer's workspace for messages of up to capacity bytes, and as many bytes of zeros."""

    capacity: int
    handle: Any
    zeros: Tensor

    def zero_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros of this shape: the residual, or the gamma less one, of a call that has none. Never written."""
        return self.zeros[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


@dataclass
class GroupState:
    """What the ranks of one group have agreed on, for one of FlashInfer's backends.

    Attributes:
        backend: its name.
        agreed: whether they have voted.
        limits: sizes that run fused, equal on all ranks.
        problem: why nothing runs fused in this group; None if something may.
        workspaces: by size in bytes of the element (2 or 4), growing capacity.
        failures: why no larger workspace exists, by size of the element.
        generation: how often the workspaces were destroyed; keeps the topics of votes apart.
        ready: what custom_ops.ready keeps of calls that ran: it holds workspaces, so it goes with them.
    """

    backend: str = backends.DEFAULT
    agreed: bool = False
    limits: Limits = limits.NONE
    problem: str | None = None
    workspaces: dict[int, list[Workspace]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    generation: int = 0
    ready: dict[Hashable, Any] = field(default_factory=dict)

    def limit_to(self, found: Limits) -> None:
        """Let sizes run fused as these limits say; calls that ran before are planned anew."""
        self.limits = found
        self.ready.clear()

    def reset(self) -> None:
        """Free all workspaces and forget the vote."""
        for made in self.workspaces.values():
            for workspace in made:
                flashinfer_adapter.release(workspace.handle, self.backend)
        self.agreed, self.generation = False, self.generation + 1
        self.ready.clear()
        self.workspaces.clear()
        self.failures.clear()
