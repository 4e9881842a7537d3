"""One tiny all-reduce after a workspace was made: on some machines that succeeds and the kernel does not work."""

from __future__ import annotations

import time

import torch
from torch.distributed import ProcessGroup

from custom_ops import flashinfer_adapter

TIMEOUT_SECONDS = 30.0
HIDDEN = 1024


def check_sum(handle: object, group: ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
    """Add 1, 2, ... over the ranks with both strategies.

    Raises:
        RuntimeError: the kernel did not finish in time, or the sum is wrong.
    """
    for one_shot in (True, False):
        contribution = torch.full((group.size() + 1, HIDDEN), group.rank() + 1, dtype=dtype, device=device)
        out = torch.full_like(contribution, -1)
        call = flashinfer_adapter.KernelCall(
            pattern_code=0,
            allreduce_in=contribution,
            allreduce_out=out,
            one_shot=one_shot,
            launch_with_pdl=False,
            completion_at_end=True,
            fp32_acc=dtype != torch.float32,
        )
        flashinfer_adapter.launch(handle, call)
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not done.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a tiny all-reduce did not finish within {TIMEOUT_SECONDS:.0f} s")
            time.sleep(1e-4)
        expected = group.size() * (group.size() + 1) / 2
        if not bool((out == expected).all()):
            raise RuntimeError(f"a tiny all-reduce gave {out.flatten()[0].item()}, expected {expected}")
