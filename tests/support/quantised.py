"""Outputs of quantising calls between guard bands, and the formats to try them with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from custom_ops import formats, reference_quant
from custom_ops.formats import Layout, Quantisation

GUARD = 4096
POISON = 0xA5

CASES: dict[str, dict[str, Any]] = {
    "fp8": {},
    "fp8_token": {},
    "fp8_group, 32": {"block_quant_group_size": 32},
    "fp8_group, 96": {"block_quant_group_size": 96},
    "fp8_group, 128": {"block_quant_group_size": 128},
    "mxfp8": {},
    "mxfp8, linear": {"layout_code": Layout.LINEAR.value},
    "nvfp4": {},
    "nvfp4, linear": {"layout_code": Layout.LINEAR.value},
}
"""Every format with its choices, as arguments of the op."""


def quantisation_of(case: str) -> Quantisation:
    """The format of a case with its choices."""
    kwargs = CASES[case]
    return formats.choose(
        case.partition(",")[0], layout_code=kwargs.get("layout_code"), group_size=kwargs.get("block_quant_group_size")
    )


def raw(tensor: Tensor) -> Tensor:
    """For comparison: torch compares no float8."""
    return tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8)


def guarded(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    """(a tensor, the bytes of its memory with guard bands), all poisoned."""
    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else 0
    memory = torch.full((elements * dtype.itemsize + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
    inner = memory[GUARD : len(memory) - GUARD].view(dtype)
    return inner.as_strided(shape, stride, inner.storage_offset()), memory


@dataclass
class Outputs:
    """Poisoned outputs of one quantising call for activations of [..., hidden].

    Attributes:
        tensors: by the names of the op's arguments: quant_out, and scale_out where there is one.
    """

    case: str
    shape: tuple[int, ...]
    device: Any = "cpu"
    tensors: dict[str, Tensor] = field(init=False)
    _memory: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        found = quantisation_of(self.case)
        values = (*self.shape[:-1], self.shape[-1] // found.format.values)
        made = {"quant_out": (values, torch.empty(values, device="meta").stride(), found.format.dtype)}
        if buffer := found.scales(self.tokens, self.shape[-1]):
            made["scale_out"] = (buffer.shape, buffer.stride, buffer.dtype)
        both = {name: guarded(*spec, self.device) for name, spec in made.items()}
        self.tensors = {name: tensor for name, (tensor, _) in both.items()}
        self._memory = [memory for _, memory in both.values()]

    @property
    def tokens(self) -> int:
        """Rows of the activations."""
        return torch.Size(self.shape[:-1]).numel()

    def check(self, values: Tensor, scales: Tensor | None) -> None:
        """Hold what was written to what is expected (scales [tokens, blocks]), bit for bit, and all else to the poison."""
        for memory in self._memory:
            assert (memory[:GUARD] == POISON).all(), "nothing before"
            assert (memory[len(memory) - GUARD :] == POISON).all(), "nothing behind"
        found = raw(self.tensors["quant_out"])
        assert torch.equal(found, raw(values).view(found.shape))
        if scales is None:
            return
        expected, _ = guarded(
            self.tensors["scale_out"].shape,
            self.tensors["scale_out"].stride(),
            self.tensors["scale_out"].dtype,
            self.device,
        )
        reference_quant.write_scales(scales, expected, quantisation_of(self.case))
        assert torch.equal(raw(self.tensors["scale_out"]), raw(expected)), "padding rows are not touched"
