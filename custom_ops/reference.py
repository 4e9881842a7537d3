"""The arithmetic of FlashInfer's kernel in plain PyTorch: where it rounds and how it casts.

It is what CPU tensors run, and the oracle of the GPU tests. Rounding happens at three places: the sum over ranks, the
sum with the residual, and the norm; each is computed in float32 from the rounded value before it. Float64 tensors,
which the kernel does not serve, stay in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_ranks(parts: Sequence[Tensor], fp32_acc: bool = True) -> Tensor:
    """Sum of the ranks' [tokens, hidden] tensors, in rank order, rounded once (fp32_acc) or after every addition.

    A negative zero counts as a positive one: the kernel marks empty slots with negative zeros and sends none.
    """
    dtype = parts[0].dtype
    total = _wide(parts[0]) + 0.0
    for part in parts[1:]:
        total = total + (_wide(part) + 0.0)
        if not fp32_acc:
            total = _wide(total.to(dtype))
    return total.to(dtype)


def add_residual(reduced: Tensor, residual: Tensor | None) -> Tensor:
    """reduced + residual, added in float32 and rounded; without a residual a zero is added, as the kernel does."""
    other = 0.0 if residual is None else _wide(residual)
    return (_wide(reduced) + other).to(reduced.dtype)


def rms_norm(x: Tensor, gamma: Tensor | None, eps: float, weight_bias: float = 0.0) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * (weight_bias + gamma) over the last dimension, in float32, rounded once.

    Without gamma the factor is 1 and weight_bias is not looked at.
    """
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    weight = 1.0 if gamma is None else weight_bias + _wide(gamma)
    return (wide * scale * weight).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
