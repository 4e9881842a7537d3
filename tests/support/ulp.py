"""Distances in units in the last place."""

from __future__ import annotations

import torch
from torch import Tensor


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance from a float64 value to the next of a type, at least that of its smallest normal number."""
    exponent = torch.floor(torch.log2(exact.abs().clamp_min(torch.finfo(dtype).tiny)))
    return torch.finfo(dtype).eps * torch.exp2(exponent)


def distance(a: Tensor, b: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Largest distance of two tensors, in ulp of a type at the exact values."""
    return ((a.double() - b.double()).abs() / ulp(exact, dtype)).max().item()
