"""Both ranks of FlashInfer's kernel on one GPU: each has a stream and a workspace, and they see each other's memory.

What the kernel computes can so be held to its arithmetic where there is one GPU; nothing is measured like this.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from custom_ops import flashinfer_adapter
from custom_ops.flashinfer_adapter import KernelCall

RANKS = 2
TIMEOUT_SECONDS = 30.0
_BARRIER_FLAGS = 256


class OneGpu:
    """Two ranks that exchange messages of up to a capacity, in bytes."""

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        flashinfer_adapter.build(announce=False)
        self._streams = [torch.cuda.Stream() for _ in range(RANKS)]
        exchange = RANKS * capacity
        self._memory: list[Tensor] = [
            *(torch.zeros(2 * exchange, dtype=torch.uint8, device="cuda") for _ in range(RANKS)),
            *(torch.zeros(RANKS * _BARRIER_FLAGS, dtype=torch.int32, device="cuda") for _ in range(RANKS)),
            *(torch.full((3 * exchange // dtype.itemsize,), -0.0, dtype=dtype, device="cuda") for _ in range(RANKS)),
        ]
        self.workspaces = [self._workspace(rank, exchange) for rank in range(RANKS)]
        torch.cuda.synchronize()

    def _workspace(self, rank: int, exchange: int) -> Any:
        """What FlashInfer's factory would return to a rank."""
        from flashinfer.comm.allreduce import TRTLLMAllReduceFusionWorkspace

        control = torch.tensor([0, 0, 0, exchange, 0], dtype=torch.int32, device="cuda")
        pointers = [tensor.data_ptr() for tensor in (*self._memory[: 3 * RANKS], control)]
        self._memory.append(control)
        made = object.__new__(TRTLLMAllReduceFusionWorkspace)
        made.__dict__.update(
            world_size=RANKS,
            rank=rank,
            workspace_tensor=torch.tensor(pointers, dtype=torch.int64, device="cuda"),
            mem_handles=[],
            metadata=None,
            _destroyed=True,
        )
        return made

    def run(self, calls: Sequence[KernelCall]) -> None:
        """Launch one call for each rank and wait for both.

        Raises:
            RuntimeError: they did not finish in time.
        """
        torch.cuda.synchronize()
        for workspace, call, stream in zip(self.workspaces, calls, self._streams, strict=True):
            with torch.cuda.stream(stream):
                flashinfer_adapter.launch(workspace, call)
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not done.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"two ranks on one GPU did not finish within {TIMEOUT_SECONDS:.0f} s")
            time.sleep(1e-4)
