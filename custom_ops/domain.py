"""What FlashInfer's all-reduce kernel can serve, and the reason where it cannot.

The launcher derives its grid from hidden size and dtype and fails, or worse, outside of this domain; so it is checked
here first. Everything asked is equal on all ranks of a group of equal GPUs.
"""

from __future__ import annotations

import torch

from custom_ops import formats
from custom_ops.formats import Quantisation

WORLD_SIZES = (2, 4, 8, 16)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MIN_CAPABILITY = (9, 0)
ACCESS_BYTES = 16
MAX_CLUSTER = 8
MAX_BLOCK_THREADS = 512
"""The launcher allows 1024, for which the kernel's registers do not suffice at every world size."""

MAX_LAMPORT_BYTES = 1 << 29
"""Largest capacity x world size: the kernel multiplies it by up to 2 in 32-bit integers."""


def block_threads(hidden: int, itemsize: int, whole: int = 0) -> int:
    """Threads per block that the launcher starts from: one 16-byte access each, split over up to 8 blocks a token.

    A block holds a multiple of `whole` elements: no group that shares a scale is split between blocks.
    """
    threads = hidden * itemsize // ACCESS_BYTES
    cluster = MAX_CLUSTER
    while threads % cluster and cluster > 1:
        cluster //= 2
    threads //= cluster
    while threads < 128 and cluster >= 2:
        threads *= 2
        cluster //= 2
    values = ACCESS_BYTES // itemsize
    while whole and threads * values % whole and cluster > 1:
        threads *= 2
        cluster //= 2
    return threads


def shape_refusal(
    hidden: int, dtype: torch.dtype, world_size: int, quantisation: Quantisation | None = None
) -> str | None:
    """Why the kernel cannot serve this shape, dtype, world size and quantisation; None if it can."""
    if world_size not in WORLD_SIZES:
        return f"world size {world_size}: the kernel serves {WORLD_SIZES}"
    if dtype not in DTYPES:
        return f"dtype {dtype}: the kernel serves {', '.join(map(str, DTYPES))}"
    if hidden * dtype.itemsize % ACCESS_BYTES:
        return f"hidden size {hidden} of {dtype}: a row must be a multiple of {ACCESS_BYTES} bytes"
    if quantisation is not None and (refusal := formats.refusal(quantisation, hidden, dtype)):
        return refusal
    whole = 0 if quantisation is None else quantisation.block
    if (threads := block_threads(hidden, dtype.itemsize, whole)) > MAX_BLOCK_THREADS:
        return f"hidden size {hidden} of {dtype}: needs blocks of {threads} threads, at most {MAX_BLOCK_THREADS} serve"
    return None


def device_refusal(capability: tuple[int, int] | None, quantisation: Quantisation | None = None) -> str | None:
    """Why the kernel cannot run on a GPU of this compute capability (None: no GPU); None if it can.

    The instructions of some formats came later than the kernel; it then writes zeros and says nothing.
    """
    if capability is None:
        return "no CUDA device"
    needed = MIN_CAPABILITY if quantisation is None else max(MIN_CAPABILITY, quantisation.format.min_capability)
    if capability < needed:
        what = "the kernel" if quantisation is None else f"{quantisation.format.title} in the kernel"
        return f"compute capability {capability[0]}.{capability[1]}: {what} needs {needed[0]}.{needed[1]} or later"
    return None


def max_capacity(world_size: int) -> int:
    """Largest message in bytes for which a workspace between world_size ranks is safe."""
    return MAX_LAMPORT_BYTES // world_size
