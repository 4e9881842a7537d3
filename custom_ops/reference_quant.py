"""The quantising arithmetic of FlashInfer's kernel in plain PyTorch: which products, which roundings, which bits.

The kernel is compiled with fast math: subnormal float32 numbers count as zero, and a division is a product with the
GPU's approximate reciprocal. On CUDA tensors that instruction is used here too, so results are equal bit for bit; on
CPU tensors the reciprocal is rounded correctly, which differs from it in the last bit for one number in eight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from custom_ops.formats import Layout, Quantisation

FLOAT8_MAX = 448.0
INVERSE_MAX = 1 / 448
"""Divisions by 448 are products with this, rounded to float32."""

SMALLEST_TOKEN_SCALE = (1 / 512) / 448
SMALLEST_GROUP_SCALE = 1e-10
_SMALLEST_NORMAL = 2.0**-126
_EXPONENT_BITS, _MANTISSA_BITS = 0x7F800000, 0x7FFFFF

Scales = Tensor | None


def quantise(x: Tensor, quantisation: Quantisation, scale: Tensor | None = None) -> tuple[Tensor, Scales]:
    """(quantised values, scales one a block in row-major order) of x, [tokens, hidden].

    Exponents come as uint8, NVFP4 scales as float8_e4m3fn, per-token scales as float32 [tokens, 1]; NVFP4 values are
    packed two in a byte, the first in the low half.

    Args:
        x: activations, [tokens, hidden].
        quantisation: the format with its choices.
        scale: the scale that is given, float32, one element: static FP8 divides by it, NVFP4 multiplies by it.
    """
    return ARITHMETIC[quantisation.format.name](x.float(), quantisation.block, scale)


def reciprocal(x: Tensor) -> Tensor:
    """1 / x of float32 as the GPU approximates it; correctly rounded on CPUs."""
    if x.device.type == "cuda":
        from custom_ops import norm_kernel

        return norm_kernel.reciprocal(x)
    return _flush(1 / _flush(x))


def _flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _SMALLEST_NORMAL, x * 0.0, x)


def _to_float8(x: Tensor, nan: float | None = None) -> Tensor:
    """Saturating cast; NaN becomes the number that the kernel's clamp makes of it, or stays NaN."""
    if nan is not None:
        x = torch.where(x.isnan(), nan, x)
    cast = x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return torch.where(x.isnan(), 0x7F, cast.view(torch.uint8)).to(torch.uint8).view(torch.float8_e4m3fn)


def _largest(x: Tensor) -> Tensor:
    """Largest magnitude along the last dimension; NaN does not count."""
    magnitude = x.abs()
    return torch.where(magnitude.isnan(), 0.0, magnitude).amax(-1, keepdim=True)


def _over_max(largest: Tensor) -> Tensor:
    return _flush(largest * torch.tensor(INVERSE_MAX, dtype=torch.float32, device=largest.device))


def static_fp8(x: Tensor, block: int, scale: Scales) -> tuple[Tensor, Scales]:
    """x * (1 / scale)."""
    assert scale is not None
    return _to_float8(_flush(x) * reciprocal(scale.reshape(1))), None


def token_fp8(x: Tensor, block: int, scale: Scales) -> tuple[Tensor, Scales]:
    """x / scale, the scale being that of the largest magnitude in the row."""
    scales = _over_max(_largest(x)).clamp_min(SMALLEST_TOKEN_SCALE)
    return _to_float8(_flush(x) * reciprocal(scales), nan=-FLOAT8_MAX), scales


def group_fp8(x: Tensor, block: int, scale: Scales) -> tuple[Tensor, Scales]:
    """x / scale, the scale being the next power of two for each group; exponents, biased by 127."""
    groups = x.unflatten(-1, (-1, block))
    bits = _over_max(_largest(groups)).clamp_min(SMALLEST_GROUP_SCALE).view(torch.int32)
    bits = torch.where((bits & _MANTISSA_BITS) != 0, (bits + _MANTISSA_BITS + 1) & _EXPONENT_BITS, bits)
    q = _to_float8(_flush(groups) * reciprocal(bits.view(torch.float32)), nan=-FLOAT8_MAX)
    return q.flatten(-2), (bits >> 23).squeeze(-1).to(torch.uint8)


def mxfp8(x: Tensor, block: int, scale: Scales) -> tuple[Tensor, Scales]:
    """x * 2^(127 - exponent), the exponent rounded up, biased by 127."""
    blocks = x.unflatten(-1, (-1, block))
    bits = _over_max(_largest(blocks)).view(torch.int32)
    exponents = ((bits >> 23) + ((bits & _MANTISSA_BITS) != 0)).clamp_max(254)
    inverse = (torch.where(exponents == 0, 0, 254 - exponents) << 23).view(torch.float32)
    q = _to_float8(_flush(blocks) * inverse, nan=FLOAT8_MAX)
    return q.flatten(-2), exponents.squeeze(-1).to(torch.uint8)


def nvfp4(x: Tensor, block: int, scale: Scales) -> tuple[Tensor, Scales]:
    """x * (scale / block scale) in four bits, the block scale being float8 of scale * largest / 6."""
    assert scale is not None
    scale = scale.reshape(1)
    blocks = x.unflatten(-1, (-1, block))
    sixth = torch.tensor(1 / 6, dtype=torch.float32, device=x.device)
    scales = _to_float8(_flush(scale * _flush(_largest(blocks) * sixth)))
    wide = scales.float()
    factor = torch.where(wide != 0, _flush(scale * reciprocal(wide)), 0.0)
    codes = _to_float4(_flush(blocks) * factor).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, scales.squeeze(-1)


def _to_float4(x: Tensor) -> Tensor:
    """Codes of sign, two exponent bits and one mantissa bit, ties to the even code; NaN becomes 6."""
    magnitude = torch.where(x.isnan(), torch.inf, x.abs())
    code = torch.zeros_like(x, dtype=torch.uint8)
    for bound in (0.25, 1.25, 2.5, 5.0):
        code += magnitude > bound
    for bound in (0.75, 1.75, 3.5):
        code += magnitude >= bound
    return code | (torch.signbit(x) & ~x.isnan()).to(torch.uint8) << 3


ARITHMETIC: dict[str, Callable[[Tensor, int, Scales], tuple[Tensor, Scales]]] = {
    "fp8": static_fp8,
    "fp8_token": token_fp8,
    "fp8_group": group_fp8,
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
}
"""(activations in float32, block, given scale) -> (values, scales), by name of the format."""


def write_scales(scales: Tensor, into: Tensor, quantisation: Quantisation) -> None:
    """Put scales in row-major order where the format has them, as the kernel does: padding rows are not touched.

    Args:
        scales: [tokens, blocks].
        into: the tensor of scales of the format.
        quantisation: the format with its choices.
    """
    if quantisation.format.name == "fp8_group":
        _write_packed(scales, into)
    elif quantisation.format.layouts and quantisation.layout == Layout.SWIZZLED_128X4:
        _write_swizzled(scales, into, pad_columns=quantisation.format.name == "mxfp8")
    else:
        into.copy_(scales.view(into.dtype).view_as(into))


def _write_packed(exponents: Tensor, into: Tensor) -> None:
    tokens, packs = into.shape
    padded = torch.nn.functional.pad(exponents, (0, 4 * packs - exponents.shape[1])).contiguous()
    into.copy_(padded.view(torch.int32))
    # The kernel clears the rows that pad a column, but for the last column, which is not padded.
    rows = -tokens % 4
    if rows and packs > 1:
        into.as_strided((rows, packs - 1), into.stride(), into.storage_offset() + tokens).zero_()


def _write_swizzled(scales: Tensor, into: Tensor, pad_columns: bool) -> None:
    tokens, columns = scales.shape
    width = -(-columns // 4) * 4
    if pad_columns:
        scales = torch.nn.functional.pad(scales.view(torch.uint8), (0, width - columns))
    row = torch.arange(tokens, device=scales.device)[:, None]
    column = torch.arange(scales.shape[1], device=scales.device)[None, :]
    tile = (row // 128) * (width // 4) + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    into.view(torch.uint8).view(-1)[place] = scales.view(torch.uint8)
