"""The checks of what is quantised: scale, outputs, layout. Every one runs before anything is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from custom_ops import formats
from custom_ops.formats import Quantisation, ScaleBuffer


@dataclass(frozen=True)
class Quantised:
    """Checked arguments.

    Attributes:
        quantisation: the format with its choices.
        out: [tokens, hidden] or, packed, [tokens, hidden / 2].
        scale_out: the tensor of scales in the shape, strides and type of the format; None where there is none.
        scale: the scale that is given, float32, one element; None where the format takes none.
    """

    quantisation: Quantisation
    out: Tensor
    scale_out: Tensor | None
    scale: Tensor | None


def check_scale(name: str, scale: Tensor, device: torch.device) -> None:
    """Check a scale that the caller gives.

    Its value is not looked at, which would wait for the device. Static FP8: a scale of zero makes zeros and NaN of the
    activations NaN and all else the largest magnitude, a NaN makes all NaN, an infinity zeros.

    Raises:
        ValueError: not one float32 on the device.
    """
    if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != device:
        raise ValueError(
            f"{name}: shape {list(scale.shape)}, {scale.dtype} on {scale.device}; must be one torch.float32 on {device}"
        )


def check_hidden(quantisation: Quantisation, hidden: int, dtype: torch.dtype) -> None:
    """Check that rows can be quantised so.

    Raises:
        ValueError: why not.
    """
    if why := formats.refusal(quantisation, hidden, dtype):
        raise ValueError(why)


def check(
    quantisation: Quantisation, like: Tensor, quant_out: Tensor, scale_out: Tensor | None, scale: Tensor | None
) -> Quantised:
    """Check and flatten what a quantising pattern writes.

    Args:
        quantisation: the format with its choices.
        like: the activations, [..., hidden].
        quant_out: [..., hidden], or [..., hidden / 2] where two values are packed in a byte.
        scale_out: the tensor of scales.
        scale: the scale that is given.

    Raises:
        ValueError: naming the argument, what it is and what is allowed.
    """
    hidden = like.shape[-1]
    check_hidden(quantisation, hidden, like.dtype)
    if scale is not None:
        check_scale("scale_factor", scale, like.device)
    out = _view_values(quantisation, like, quant_out)
    buffer = quantisation.scales(like.numel() // hidden, hidden)
    scales = None if buffer is None or scale_out is None else _view_scales(quantisation, buffer, scale_out, like.device)
    return Quantised(quantisation, out, scales, scale)


def _view_values(quantisation: Quantisation, like: Tensor, out: Tensor) -> Tensor:
    found = quantisation.format
    width = like.shape[-1] // found.values
    wanted = [*like.shape[:-1], width]
    right = out.dim() and out.shape[-1] == width and out.numel() * found.values == like.numel()
    if out.dtype != found.dtype or out.device != like.device or not right or not out.is_contiguous():
        raise ValueError(
            f"quant_out: {_describe(out)}; {found.title} needs a contiguous {wanted} of {found.dtype} on {like.device}"
        )
    return out.view(-1, width) if out.numel() else out.new_empty((0, width))


def _view_scales(quantisation: Quantisation, buffer: ScaleBuffer, out: Tensor, device: torch.device) -> Tensor:
    dtypes = (buffer.dtype, *quantisation.format.byte_types)
    dense = buffer.stride[-1] == 1
    fits = out.is_contiguous() and out.numel() == buffer.shape[0] * buffer.shape[1] if dense else _same(out, buffer)
    if out.dtype not in dtypes or out.device != device or not fits:
        raise ValueError(
            f"scale_out: {_describe(out)}; {quantisation.format.title} needs {list(buffer.shape)} with strides "
            f"{list(buffer.stride)} of {' or '.join(map(str, dtypes))} on {device}"
        )
    return out.view(buffer.dtype).as_strided(buffer.shape, buffer.stride)


def _same(out: Tensor, buffer: ScaleBuffer) -> bool:
    """Whether shapes are equal, and strides where there is more than one element."""
    steps = zip(out.shape, out.stride(), buffer.stride, strict=False)
    return tuple(out.shape) == buffer.shape and all(mine == its for size, mine, its in steps if size > 1)


def _describe(tensor: Tensor) -> str:
    return f"shape {list(tensor.shape)} with strides {list(tensor.stride())}, {tensor.dtype} on {tensor.device}"
