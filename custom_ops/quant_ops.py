"""Quantising ops for people who write models: functional, any rank, the arithmetic of the fused kernel.

The pass recognises them behind a norm and takes them into its call. Where it does not they run by themselves: on CPUs
and wherever FlashInfer has no kernel of their format, in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from custom_ops import flashinfer_quant, formats, quant_arguments, reference_quant
from custom_ops.formats import Quantisation

_OPS = torch.ops.custom_ops


def scaled_fp8_quant(x: Tensor, scale: Tensor | None = None, *, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantise to float8_e4m3fn, saturating; the same as, in eager PyTorch::

        scale = x.float().abs().amax(-1, keepdim=True) / 448   # static: as given; per group: rounded up to 2^n
        return (x.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    Args:
        x: activations, [..., hidden], bfloat16, float16 or float32.
        scale: one float32 on the device of x: static. None: one scale a token, or a group.
        group_size: elements of a row that share a scale; divides hidden.

    Returns:
        (values, scales): values like x. Scales: static, the one that was given; per token, float32 [..., 1], at least
        (1 / 512) / 448; per group, int32 [tokens, ceil(hidden / group_size / 4)] of four exponent bytes each,
        column-major, columns padded to four rows. In dynamic formats a NaN does not count for the scale and becomes
        -448; with a static scale it stays NaN, and zero times 1 / 0 is NaN.

    Raises:
        ValueError: shape, type, device, or both a scale and a group size.
    """
    if scale is not None and group_size is not None:
        raise ValueError(f"scale and group_size={group_size}: a given scale serves the whole tensor; pass one of them")
    if scale is not None:
        return _OPS.scaled_fp8_quant.static(x, scale), scale
    if group_size is not None:
        return _OPS.scaled_fp8_quant.per_group(x, group_size)  # type: ignore[no-any-return]
    return _OPS.scaled_fp8_quant.per_token(x)  # type: ignore[no-any-return]


def mxfp8_quant(x: Tensor, *, layout_code: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantise to MXFP8: float8_e4m3fn, 32 elements share a power of two; the same as, in eager PyTorch::

        blocks = x.float().unflatten(-1, (-1, 32))
        scale = exp2(ceil(log2(blocks.abs().amax(-1, keepdim=True) / 448)))
        return (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scale

    Args:
        x: activations, [..., hidden], hidden a multiple of 32.
        layout_code: 0 (swizzled 128x4, the default) or 2 (linear).

    Returns:
        (values, scales): values like x; scales float8_e8m0fnu [tokens, hidden / 32], swizzled: tokens rounded up to
        128, columns to 4, padding zero. A NaN does not count for the scale and becomes 448.

    Raises:
        ValueError: shape, type or layout.
    """
    return _OPS.mxfp8_quant(x, layout_code=layout_code)  # type: ignore[no-any-return]


def scaled_fp4_quant(x: Tensor, global_scale: Tensor, *, layout_code: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantise to NVFP4: four bits, 16 elements share a float8 scale; the same as, in eager PyTorch::

        blocks = x.float().unflatten(-1, (-1, 16))
        scale = (global_scale * blocks.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn)
        return pack((blocks * global_scale / scale.float()).to(float4_e2m1).flatten(-2)), scale

    Args:
        x: activations, [..., hidden], bfloat16 or float16, hidden a multiple of 16.
        global_scale: one float32 on the device of x: 448 * 6 / (largest magnitude to be expected).
        layout_code: 0 (swizzled 128x4, the default) or 2 (linear).

    Returns:
        (values, scales): values uint8 [..., hidden / 2], the first of two in the low half; scales float8_e4m3fn
        [tokens, hidden / 16], swizzled: tokens rounded up to 128, columns to 4, padding zero.

    Raises:
        ValueError: shape, type, device or layout.
    """
    return _OPS.scaled_fp4_quant(x, global_scale, layout_code=layout_code)  # type: ignore[no-any-return]


def _run(x: Tensor, quantisation: Quantisation, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not x.dim() or not x.shape[-1]:
        raise ValueError(
            f"x: shape {list(x.shape)} of {x.dtype}; pass [..., hidden] of bfloat16, float16 or float32 (hidden > 0)"
        )
    quant_arguments.check_hidden(quantisation, x.shape[-1], x.dtype)
    if scale is not None:
        quant_arguments.check_scale("scale", scale, x.device)
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] and flashinfer_quant.serves(quantisation, x.device):
        return _like(x, *flashinfer_quant.quantise(flat, quantisation, scale))
    values, linear = reference_quant.quantise(flat, quantisation, scale)
    buffer = quantisation.scales(*flat.shape)
    if buffer is None or linear is None:
        return _like(x, values, None)
    scales = buffer.zeros(x.device)
    if flat.shape[0]:
        reference_quant.write_scales(linear, scales, quantisation)
    return _like(x, values, scales)


def _fake(x: Tensor, quantisation: Quantisation) -> tuple[Tensor, Tensor | None]:
    flat = x.reshape(-1, x.shape[-1])
    values = flat.new_empty(
        (flat.shape[0], flat.shape[1] // quantisation.format.values), dtype=quantisation.format.dtype
    )
    buffer = quantisation.scales(*flat.shape)
    return _like(x, values, None if buffer is None else buffer.empty(x.device))


def _like(x: Tensor, values: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The leading dimensions of x given back, to values and to scales of one a token."""
    rows = x.shape[:-1]
    per_token = scales is not None and scales.dtype == torch.float32
    return values.view(*rows, values.shape[-1]), scales.view(*rows, 1) if scales is not None and per_token else scales


Choice = tuple[Quantisation, Tensor | None]

OPS: dict[str, tuple[str, Callable[..., Choice]]] = {
    "scaled_fp8_quant.static": (
        "(Tensor x, Tensor scale) -> Tensor",
        lambda scale: (formats.choose("fp8"), scale),
    ),
    "scaled_fp8_quant.per_token": (
        "(Tensor x) -> (Tensor, Tensor)",
        lambda: (formats.choose("fp8_token"), None),
    ),
    "scaled_fp8_quant.per_group": (
        "(Tensor x, int group_size) -> (Tensor, Tensor)",
        lambda group_size: (formats.choose("fp8_group", group_size=group_size), None),
    ),
    "mxfp8_quant": (
        "(Tensor x, *, int? layout_code=None) -> (Tensor, Tensor)",
        lambda layout_code=None: (formats.choose("mxfp8", layout_code=layout_code), None),
    ),
    "scaled_fp4_quant": (
        "(Tensor x, Tensor global_scale, *, int? layout_code=None) -> (Tensor, Tensor)",
        lambda global_scale, layout_code=None: (formats.choose("nvfp4", layout_code=layout_code), global_scale),
    ),
}
"""Every op: its schema, and its format and given scale from its arguments but the first."""


def _register(name: str, schema: str, choose: Callable[..., Choice]) -> None:
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, scales = _run(x, *choose(*args, **kwargs))
        return values if scales is None else (values, scales)

    def fake(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        values, scales = _fake(x, choose(*args, **kwargs)[0])
        return values if scales is None else (values, scales)

    torch.library.define(f"custom_ops::{name}", schema)
    torch.library.impl(f"custom_ops::{name}", ("cpu", "cuda"), run)
    torch.library.register_fake(f"custom_ops::{name}", fake)


for _name, (_schema, _choose) in OPS.items():
    _register(_name, _schema, _choose)
