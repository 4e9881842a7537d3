"""Quantisations of a norm as people write them, and the block around them: all-reduce, add, norm, quantise."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import custom_ops
from tests.support.programs import HIDDEN, Functional, reduce

FLOAT8 = torch.float8_e4m3fn
MAX = 448.0
SCALE = 0.037


def with_its_numbers() -> AbstractContextManager[Any]:
    """Compile in here: from torch 2.15 on dynamic=True makes inputs of the numbers that a spelling clamps to."""
    hides = TorchVersion(torch.__version__) >= "2.15"
    return torch._dynamo.config.patch(specialize_float=True) if hides else nullcontext()  # type: ignore[no-any-return]


class Quantised(nn.Module):
    """residual + all_reduce(x), its norm, and what is made of that."""

    def __init__(self, quantise: Callable[..., Any], hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.norm = Functional(hidden, dtype)
        self.quantise = quantise

    def forward(self, x: Tensor, residual: Tensor, *scales: Tensor) -> tuple[Any, Tensor]:
        """(what is made of the norm, new residual)."""
        total = residual + reduce(x)
        return self.quantise(self.norm(total), *scales), total


def divide(n: Tensor, s: Tensor) -> Tensor:
    return (n.float() / s).clamp(-MAX, MAX).to(FLOAT8)


def multiply_by_reciprocal(n: Tensor, s: Tensor) -> Tensor:
    return (n.float() * s.reciprocal()).clamp(-MAX, MAX).to(FLOAT8)


def one_over(n: Tensor, s: Tensor) -> Tensor:
    return ((1.0 / s) * n.float()).clamp(-MAX, MAX).to(FLOAT8)


def multiply_by_inverse(n: Tensor, inverse: Tensor) -> Tensor:
    return (n.float() * inverse).clamp(-MAX, MAX).to(FLOAT8)


def divide_in_bfloat16(n: Tensor, s: Tensor) -> Tensor:
    return (n / s).clamp(-MAX, MAX).to(FLOAT8)


def multiply_in_bfloat16(n: Tensor, s: Tensor) -> Tensor:
    return (n * (1.0 / s)).clamp(-MAX, MAX).to(FLOAT8)


def python_factor(n: Tensor) -> Tensor:
    return (n.float() * 16.0).clamp(-MAX, MAX).to(FLOAT8)


def python_divisor(n: Tensor) -> Tensor:
    return (n / SCALE).clamp(-MAX, MAX).to(FLOAT8)


def no_clamp(n: Tensor, s: Tensor) -> Tensor:
    return (n.float() / s).to(FLOAT8)


def maximum_first(n: Tensor, s: Tensor) -> Tensor:
    return (n.float() / s).clamp_max(MAX).clamp_min(-MAX).to(FLOAT8)


def with_tensors(n: Tensor, s: Tensor) -> Tensor:
    low, high = torch.full((), -MAX), torch.full((), MAX)
    return torch.minimum(high, torch.maximum(n.float() / s, low)).to(FLOAT8)


def after_reshape(n: Tensor, s: Tensor) -> Tensor:
    return divide(n.reshape(-1, n.shape[-1]), s)


def before_reshape(n: Tensor, s: Tensor) -> Tensor:
    return divide(n, s).reshape(-1, n.shape[-1])


def rows(n: Tensor) -> tuple[Tensor, Tensor]:
    scale = n.float().abs().amax(-1, keepdim=True) / 448.0
    return divide(n, scale), scale


def rows_with_floor(n: Tensor) -> tuple[Tensor, Tensor]:
    scale = (n.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-12)
    return divide(n, scale), scale


def rows_by_reciprocal(n: Tensor) -> tuple[Tensor, Tensor]:
    scale = n.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) * (1 / 448)
    return multiply_by_reciprocal(n, scale), scale


def torchao_rows(n: Tensor) -> tuple[Tensor, Tensor]:
    """torchao's Float8DynamicActivation...(PerRow()): the scale is taken in bfloat16."""
    scale = (n.abs().amax(-1, keepdim=True) / 448.0).to(torch.float32)
    values = (n.to(torch.float32) / scale).clamp(-MAX, MAX).to(FLOAT8)
    return values.reshape(-1, n.shape[-1]), scale.unsqueeze(-1).reshape(-1, 1)


def compressed_tensors_rows(n: Tensor) -> tuple[Tensor, Tensor]:
    """Hugging Face's CompressedTensorsFP8Linear: rows of zeros are guarded by a comparison."""
    wide = n.reshape(-1, n.shape[-1]).float()
    largest = wide.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest)) / 448.0
    values = (wide / scale.unsqueeze(-1)).clamp(-MAX, MAX).to(FLOAT8)
    return values, scale.unsqueeze(-1)


@dataclass(frozen=True)
class Spelling:
    """One way to quantise.

    Attributes:
        quantise: (norm, *scales) -> values, or values and scales.
        format: name of the format that the op writes.
        scales: the scales that it takes.
        exact: whether it rounds as the kernel does, so that exact_rounding fuses it.
        share: largest share of values that may differ from eager mode, by one code point each.
    """

    quantise: Callable[..., Any]
    format: str
    scales: tuple[Tensor, ...] = ()
    exact: bool = False
    share: float = 0.0


_S = torch.tensor(SCALE)

SPELLINGS: dict[str, Spelling] = {
    "divide": Spelling(divide, "fp8", (_S,), share=1e-4),
    "multiply by reciprocal": Spelling(multiply_by_reciprocal, "fp8", (_S,), exact=True),
    "one over": Spelling(one_over, "fp8", (_S,), exact=True),
    "multiply by inverse": Spelling(multiply_by_inverse, "fp8", (1 / _S,), share=1e-4),
    "divide in bfloat16": Spelling(divide_in_bfloat16, "fp8", (_S,), share=0.03),
    "multiply in bfloat16": Spelling(multiply_in_bfloat16, "fp8", (_S,), share=0.03),
    "python factor": Spelling(python_factor, "fp8", exact=True),
    "python divisor": Spelling(python_divisor, "fp8", share=0.03),
    "no clamp": Spelling(no_clamp, "fp8", (_S,), share=1e-4),
    "maximum first": Spelling(maximum_first, "fp8", (_S,), share=1e-4),
    "minimum and maximum": Spelling(with_tensors, "fp8", (_S,), share=1e-4),
    "scale of one dimension": Spelling(divide, "fp8", (_S.reshape(1),), share=1e-4),
    "scale in bfloat16": Spelling(divide, "fp8", (_S.bfloat16(),), share=1e-4),
    "after reshape": Spelling(after_reshape, "fp8", (_S,), share=1e-4),
    "before reshape": Spelling(before_reshape, "fp8", (_S,), share=1e-4),
    "rows": Spelling(rows, "fp8_token", share=1e-3),
    "rows with floor": Spelling(rows_with_floor, "fp8_token", share=1e-3),
    "rows by reciprocal": Spelling(rows_by_reciprocal, "fp8_token", share=1e-3),
    "torchao rows": Spelling(torchao_rows, "fp8_token", share=0.03),
    "compressed-tensors rows": Spelling(compressed_tensors_rows, "fp8_token", share=1e-3),
    "own static": Spelling(lambda n, s: custom_ops.scaled_fp8_quant(n, s)[0], "fp8", (_S,), exact=True),
    "own per token": Spelling(custom_ops.scaled_fp8_quant, "fp8_token", exact=True),
    "own per group": Spelling(lambda n: custom_ops.scaled_fp8_quant(n, group_size=32), "fp8_group", exact=True),
    "own MXFP8": Spelling(custom_ops.mxfp8_quant, "mxfp8", exact=True),
    "own MXFP8, linear": Spelling(lambda n: custom_ops.mxfp8_quant(n, layout_code=2), "mxfp8", exact=True),
    "own NVFP4": Spelling(custom_ops.scaled_fp4_quant, "nvfp4", (torch.tensor(300.0),), exact=True),
    "own NVFP4, linear": Spelling(
        lambda n, s: custom_ops.scaled_fp4_quant(n, s, layout_code=2), "nvfp4", (torch.tensor(300.0),), exact=True
    ),
}
"""Every spelling that fuses."""
