"""Residual add, RMSNorm and FP8 of one row per program, with the roundings of the fused kernel (Triton, CUDA only)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from custom_ops.quant_arguments import Quantised
from custom_ops.reference_quant import FLOAT8_MAX, INVERSE_MAX, SMALLEST_TOKEN_SCALE

FORMATS = {"fp8": 1, "fp8_token": 2}
"""Formats that are made here, with the code of the kernel's branch; the others need neighbours of a row."""


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor | None,
    eps: float,
    weight_bias: float,
    residual_out: Tensor,
    norm_out: Tensor | None,
    quantised: Quantised | None = None,
) -> None:
    """residual_out = x + residual; norm_out = rms_norm(residual_out) * (weight_bias + gamma); quantised of that.

    All tensors but gamma, [hidden], are contiguous [tokens, hidden]; all but quantised values of one dtype. An output
    may be an input. Without a residual zero is added, without gamma the weight is one, without norm_out the norm is
    not written. The format of quantised is one of FORMATS.
    """
    tokens, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(tokens,)](
        x,
        x if residual is None else residual,
        x if gamma is None else gamma,
        residual_out,
        residual_out if norm_out is None else norm_out,
        residual_out if quantised is None else quantised.out,
        _scale_of(quantised, x),
        hidden,
        eps,
        weight_bias,
        HAS_RESIDUAL=residual is not None,
        HAS_GAMMA=gamma is not None,
        HAS_NORM=norm_out is not None,
        QUANT=0 if quantised is None else FORMATS[quantised.quantisation.format.name],
        INVERSE_MAX=INVERSE_MAX,
        SMALLEST=SMALLEST_TOKEN_SCALE,
        MAX=FLOAT8_MAX,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


def _scale_of(quantised: Quantised | None, unused: Tensor) -> Tensor:
    """The scale that is read, or the scales that are written."""
    if quantised is None:
        return unused
    found = quantised.scale if quantised.scale is not None else quantised.scale_out
    assert found is not None
    return found


@triton.jit
def _add_rms_norm(
    x, residual, gamma, residual_out, norm_out, quant_out, scales, hidden, eps, weight_bias,
    HAS_RESIDUAL: tl.constexpr, HAS_GAMMA: tl.constexpr, HAS_NORM: tl.constexpr, QUANT: tl.constexpr,
    INVERSE_MAX: tl.constexpr, SMALLEST: tl.constexpr, MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * hidden
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        total += 0.0
    rounded = total.to(residual_out.dtype.element_ty)
    tl.store(residual_out + start + columns, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / hidden + eps)
    normed = value * scale
    if HAS_GAMMA:
        normed *= weight_bias + tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
    narrow = normed.to(residual_out.dtype.element_ty)
    if HAS_NORM:
        tl.store(norm_out + start + columns, narrow, mask=inside)
    if QUANT:
        wide = narrow.to(tl.float32)
        if QUANT == 1:
            factor = _approximate_reciprocal(tl.load(scales))
        else:
            # A NaN does not count.
            largest = tl.max(tl.where(wide == wide, tl.abs(wide), 0.0))
            row_scale = tl.maximum(largest * INVERSE_MAX, SMALLEST)
            tl.store(scales + tl.program_id(0), row_scale)
            factor = _approximate_reciprocal(row_scale)
        scaled = wide * factor
        is_nan = scaled != scaled
        bounded = tl.minimum(tl.maximum(scaled, -MAX), MAX)
        scaled = tl.where(is_nan, scaled if QUANT == 1 else -MAX, bounded)
        tl.store(quant_out + start + columns, scaled.to(quant_out.dtype.element_ty), mask=inside)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x of float32 by the instruction that the fused kernel's divisions are made of."""
    flat = x.contiguous().view(-1)
    out = torch.empty_like(flat)
    block = 1024
    _reciprocal[(triton.cdiv(flat.numel(), block),)](flat, out, flat.numel(), BLOCK=block)
    return out.view(x.shape)


@triton.jit
def _approximate_reciprocal(x):
    assembly: tl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(assembly, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(out + places, _approximate_reciprocal(tl.load(x + places, mask=inside, other=1.0)), mask=inside)
