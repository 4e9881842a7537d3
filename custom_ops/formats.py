"""Quantised formats: one row each. What a row of activations becomes, and where its scales lie.

A new format is a row in FORMATS, its arithmetic in reference_quant.ARITHMETIC, and the kernel's patterns in
pattern_codes.PATTERNS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class Layout(IntEnum):
    """FlashInfer's codes for the place of block scales."""

    SWIZZLED_128X4 = 0
    SWIZZLED_8X4 = 1
    LINEAR = 2


@dataclass(frozen=True)
class ScaleBuffer:
    """A tensor of scales: what a functional op returns, and what the fused op writes into.

    Attributes:
        shape: of the tensor.
        stride: of the tensor.
        dtype: its canonical type.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> Tensor:
        """A new one; padding stays zero."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        return made.view(torch.uint8).zero_().view(self.dtype) if self.dtype.itemsize == 1 else made.zero_()

    def empty(self, device: torch.device) -> Tensor:
        """A new one, not filled."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Format:
    """One quantised format.

    Attributes:
        name: how rules and reports call it.
        title: how sentences call it.
        dtype: type of the quantised tensor.
        values: quantised values in one element of it.
        block: elements of a row that share a scale; 0 where that is not fixed.
        layouts: allowed places of block scales; empty where there is no choice.
        takes_scale: whether the caller gives a scale.
        scales: (tokens, hidden, block, layout) -> the tensor of scales that is written; None where there is none.
        byte_types: further types that the tensor of scales may have: it is bytes.
        min_capability: first compute capability whose kernel has it.
        release: first release of FlashInfer whose kernel has it.
        activations: types of the activations; None for all.
    """

    name: str
    title: str
    dtype: torch.dtype
    values: int = 1
    block: int = 0
    layouts: tuple[Layout, ...] = ()
    takes_scale: bool = False
    scales: Callable[[int, int, int, Layout], ScaleBuffer] | None = None
    byte_types: tuple[torch.dtype, ...] = ()
    min_capability: tuple[int, int] = (9, 0)
    release: str = "0.7.2"
    activations: tuple[torch.dtype, ...] | None = None


def _rounded_up(size: int, multiple: int) -> int:
    return (size + (multiple - 1)) // multiple * multiple


def token_scales(tokens: int, hidden: int, block: int, layout: Layout) -> ScaleBuffer:
    """One float32 a row."""
    return ScaleBuffer((tokens, 1), (1, 1), torch.float32)


def packed_group_scales(tokens: int, hidden: int, block: int, layout: Layout) -> ScaleBuffer:
    """Four exponent bytes in an int32, column-major, columns padded to four rows: as DeepGEMM reads them."""
    return ScaleBuffer((tokens, _rounded_up(hidden // block, 4) // 4), (1, _rounded_up(tokens, 4)), torch.int32)


def block_scales(dtype: torch.dtype) -> Callable[[int, int, int, Layout], ScaleBuffer]:
    """One byte a block, row by row or in tiles of 128 rows and 4 columns as tensor cores read them."""

    def made(tokens: int, hidden: int, block: int, layout: Layout) -> ScaleBuffer:
        rows, columns = tokens, hidden // block
        if layout == Layout.SWIZZLED_128X4:
            rows, columns = _rounded_up(rows, 128), _rounded_up(columns, 4)
        return ScaleBuffer((rows, columns), (columns, 1), dtype)

    return made


_BLOCK_LAYOUTS = (Layout.SWIZZLED_128X4, Layout.LINEAR)
_FLOAT8 = torch.float8_e4m3fn

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("fp8", "static FP8", _FLOAT8, takes_scale=True),
        Format("fp8_token", "per-token FP8", _FLOAT8, scales=token_scales),
        Format("fp8_group", "per-group FP8", _FLOAT8, scales=packed_group_scales),
        Format(
            "mxfp8", "MXFP8", _FLOAT8, block=32, layouts=_BLOCK_LAYOUTS, scales=block_scales(torch.float8_e8m0fnu),
            byte_types=(torch.uint8,), release="0.7.4",
        ),
        Format(
            "nvfp4", "NVFP4", torch.uint8, values=2, block=16, layouts=_BLOCK_LAYOUTS, takes_scale=True,
            scales=block_scales(_FLOAT8), byte_types=(torch.uint8,), min_capability=(10, 0),
            activations=(torch.bfloat16, torch.float16),
        ),
    )
}  # fmt: skip
"""Every format, by name."""


@dataclass(frozen=True)
class Quantisation:
    """A format with its choices.

    Attributes:
        format: the format.
        block: elements of a row that share a scale; 0 for all of them.
        layout: place of block scales.
    """

    format: Format
    block: int = 0
    layout: Layout = Layout.SWIZZLED_128X4

    def scales(self, tokens: int, hidden: int) -> ScaleBuffer | None:
        """The tensor of scales that it writes; None where there is none."""
        made = self.format.scales
        return None if made is None else made(tokens, hidden, self.block, self.layout)


def choose(name: str, *, layout_code: int | None = None, group_size: int | None = None) -> Quantisation:
    """A format with its choices.

    Args:
        name: of the format.
        layout_code: one of Layout; None for the format's first.
        group_size: for "fp8_group" only.

    Raises:
        ValueError: a choice that the format does not have.
    """
    found = FORMATS[name]
    layout = found.layouts[0] if layout_code is None and found.layouts else Layout.SWIZZLED_128X4
    if layout_code is not None:
        if layout_code not in found.layouts:
            allowed = ", ".join(f"{row.value} ({row.name})" for row in found.layouts) or "None"
            raise ValueError(f"layout_code={layout_code}: {found.title} scales can be laid out as {allowed}")
        layout = Layout(layout_code)
    if name == "fp8_group":
        if not group_size or group_size < 0:
            raise ValueError(f"block_quant_group_size={group_size}: {found.title} needs a positive number of elements")
        return Quantisation(found, group_size, layout)
    if group_size:
        raise ValueError(f"block_quant_group_size={group_size}: {found.title} takes none; pass None")
    return Quantisation(found, found.block, layout)


def refusal(quantisation: Quantisation, hidden: int, dtype: torch.dtype) -> str | None:
    """Why a row of hidden elements of a type cannot be quantised so; None if it can."""
    found = quantisation.format
    if quantisation.block and hidden % quantisation.block:
        return f"hidden size {hidden}: in {found.title} {quantisation.block} elements share a scale, so it must divide"
    if found.activations is not None and dtype not in found.activations:
        allowed = ", ".join(map(str, found.activations))
        return f"activations of {dtype}: {found.title} is made of {allowed}"
    return None
