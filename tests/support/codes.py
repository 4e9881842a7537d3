"""Distances between quantised tensors in code points."""

from __future__ import annotations

import torch
from torch import Tensor


def ordinals(values: Tensor) -> Tensor:
    """The place of each float8 value, or of each of two packed float4 values, in the order of its type."""
    raw = values.contiguous().view(torch.uint8)
    if values.dtype == torch.uint8:
        nibbles = torch.stack([raw & 0xF, raw >> 4], -1).int()
        return torch.where(nibbles >= 8, -(nibbles & 7), nibbles)
    codes = raw.int()
    return torch.where(codes >= 128, -(codes & 127), codes)


def distance(a: Tensor, b: Tensor) -> tuple[float, int]:
    """(share of values that differ, largest difference in code points)."""
    apart = (ordinals(a) - ordinals(b)).abs()
    return (apart > 0).float().mean().item(), int(apart.max())
