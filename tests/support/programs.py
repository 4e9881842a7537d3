"""Norms as people write them, and the block around them: all-reduce, residual add, norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN = 64
EPS = 1e-5


class HandWritten(nn.Module):
    """A norm with a weight near one and epsilon as an attribute, as hand-written models have it."""

    def __init__(self, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.weight = nn.Parameter((1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype))
        self.eps = EPS


class HuggingFaceLlama(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)


class Meta(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class GptFast(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(torch.mean(x32 * x32, dim=-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class GptOss(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.to(torch.float32)
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * x32).to(x.dtype)


class Float32Weight(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (self.weight.float() * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class Gemma(HandWritten):
    def __init__(self, hidden: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(hidden, dtype)
        self.weight.data -= 1

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x32 * (1.0 + self.weight.float())).type_as(x)


class NoWeight(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class T5(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps)).to(x.dtype)


class ScaleFirst(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps) * x32).to(x.dtype) * self.weight


class DivideByRoot(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class ReciprocalRoot(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * (1 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps))).to(x.dtype) * self.weight


class PowerMinusHalf(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return (x32 * (x32.square().mean(-1, keepdim=True) + self.eps) ** -0.5).to(x.dtype) * self.weight


class SumOverHidden(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        variance = (x32 * x32).sum(-1, keepdim=True) / x.shape[-1]
        return (x32 * torch.rsqrt(self.eps + variance)).to(x.dtype) * self.weight


class Functional(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class FunctionalFloat32(HandWritten):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


NORMS: dict[str, type[HandWritten]] = {
    "functional": Functional,
    "functional_float32": FunctionalFloat32,
    "hugging_face_llama": HuggingFaceLlama,
    "meta": Meta,
    "gpt_fast": GptFast,
    "gpt_oss": GptOss,
    "float32_weight": Float32Weight,
    "gemma": Gemma,
    "no_weight": NoWeight,
    "t5": T5,
    "scale_first": ScaleFirst,
    "divide_by_root": DivideByRoot,
    "reciprocal_root": ReciprocalRoot,
    "power_minus_half": PowerMinusHalf,
    "sum_over_hidden": SumOverHidden,
}
"""Every form that fuses."""

ROUNDS_BEFORE_WEIGHT = {
    "hugging_face_llama", "meta", "gpt_fast", "t5", "scale_first", "divide_by_root", "reciprocal_root",
    "power_minus_half", "sum_over_hidden",
}  # fmt: skip
"""Forms that round the norm before its weight is applied."""


def reduce(x: Tensor, op: str = "sum") -> Tensor:
    """The functional all-reduce over the default group."""
    return funcol.all_reduce(x, op, dist.group.WORLD)  # type: ignore[arg-type]


class AddNorm(nn.Module):
    """residual + all_reduce(x), and its norm."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the new residual, new residual)."""
        total = residual + reduce(x)
        return self.norm(total), total


class JustNorm(nn.Module):
    """all_reduce(x), and its norm, as after an embedding."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum)."""
        total = reduce(x)
        return self.norm(total), total


def tensors(*shape: int, dtype: torch.dtype = torch.bfloat16, count: int = 2, seed: int = 0) -> list[Tensor]:
    """Random tensors of one shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
