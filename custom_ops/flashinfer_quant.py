"""FlashInfer's own quantising kernels, for the formats and devices that have one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from custom_ops import flashinfer_adapter, machine
from custom_ops.formats import Layout, Quantisation

MIN_CAPABILITY = (10, 0)


def serves(quantisation: Quantisation, device: torch.device) -> bool:
    """Whether a kernel of FlashInfer quantises so on this device."""
    if device.type != "cuda" or quantisation.format.name not in KERNELS or flashinfer_adapter.refusal():
        return False
    return (machine.capability(device) or (0, 0)) >= MIN_CAPABILITY


def quantise(x: Tensor, quantisation: Quantisation, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """(values, scales) of x, [tokens, hidden], in the shapes of the format."""
    values, scales = KERNELS[quantisation.format.name](x, quantisation, scale)
    buffer = quantisation.scales(*x.shape)
    assert buffer is not None
    return values, scales.view(torch.uint8).view(buffer.dtype).view(buffer.shape)


def _mxfp8(x: Tensor, quantisation: Quantisation, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    from flashinfer.quantization import mxfp8_quantize

    swizzled = quantisation.layout == Layout.SWIZZLED_128X4
    return mxfp8_quantize(x, is_sf_swizzled_layout=swizzled)  # type: ignore[no-any-return]


def _nvfp4(x: Tensor, quantisation: Quantisation, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    from flashinfer.quantization import fp4_quantize

    swizzled = quantisation.layout == Layout.SWIZZLED_128X4
    return fp4_quantize(x, scale, sf_vec_size=16, is_sf_swizzled_layout=swizzled)  # type: ignore[no-any-return]


KERNELS: dict[str, Callable[[Tensor, Quantisation, Tensor | None], tuple[Tensor, Tensor]]] = {
    "mxfp8": _mxfp8,
    "nvfp4": _nvfp4,
}
"""Kernels by name of the format."""
