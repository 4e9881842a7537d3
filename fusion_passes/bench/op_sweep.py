"""One all-reduce, add and RMSNorm, by message size: torch.compile with the pass against torch.compile without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import custom_ops
import fusion_passes
from fusion_passes.bench.timing import Timing, per_call, slowest

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Point:
    """One size. Times in microseconds per call.

    Attributes:
        tokens: rows.
        hidden: elements of a row.
        fused: compiled with the pass.
        stock: compiled without, from the same function; torch.compile copies its input before NCCL reduces in place.
        stock_in_place: compiled without, reducing its input in place: no copy.
        strategy: how the fused op ran; "not rewritten" where the pass left the all-reduce alone.
        itemsize: bytes of an element.
        format: what the norm is quantised to behind it; None where it is not.
    """

    tokens: int
    hidden: int
    fused: Timing
    stock: Timing
    stock_in_place: Timing
    strategy: str
    itemsize: int
    format: str | None = None

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return self.tokens * self.hidden * self.itemsize


def _static(x: Tensor, scale: Tensor) -> Any:
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _per_token(x: Tensor, scale: Tensor) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return _static(x, scale), scale


FORMATS: dict[str, Callable[[Tensor, Tensor], Any]] = {"fp8": _static, "fp8_token": _per_token}
"""Quantisations in plain PyTorch, which Inductor makes one kernel of with the norm."""


def sweep(
    hidden: int,
    tokens: Sequence[int] = TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    format: str | None = None,
) -> list[Point]:
    """Measure all sizes on the current GPUs, quantising or not; collective over the default group."""
    return [_measure(count, hidden, dtype, format) for count in tokens]


def _measure(tokens: int, hidden: int, dtype: torch.dtype, format: str | None) -> Point:
    x, residual = (torch.randn(tokens, hidden, device="cuda", dtype=dtype) for _ in range(2))
    norm = torch.nn.RMSNorm(hidden, device="cuda", dtype=dtype)
    world = dist.group.WORLD
    scale = torch.tensor(0.02, device="cuda")
    finish = (lambda x, scale: x) if format is None else FORMATS[format]

    def functional(x: Tensor, residual: Tensor) -> Any:
        total = residual + funcol.all_reduce(x, "sum", world)  # type: ignore[arg-type]
        return finish(norm(total), scale), total

    def in_place(x: Tensor, residual: Tensor) -> Any:
        dist.all_reduce(x)
        total = residual + x
        return finish(norm(total), scale), total

    calls = 20 if tokens <= 1024 else 5
    with torch.inference_mode():
        custom_ops.reset_launches()
        fused = _time(functional, x, residual, calls, fusion_passes.options())
        ran = "/".join(sorted(launch.strategy.value for launch in custom_ops.launches())) or "not rewritten"
        stock = _time(functional, x, residual, calls, {})
        stock_in_place = _time(in_place, x, residual, calls, {})
    return Point(tokens, hidden, fused, stock, stock_in_place, ran, dtype.itemsize, format)


def _time(
    fn: Callable[[Tensor, Tensor], Any], x: Tensor, residual: Tensor, calls: int, options: dict[str, Any]
) -> Timing:
    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, dynamic=False, options=options or None)
    source = x.clone()
    for _ in range(3):
        compiled(x, residual)
    timing = per_call(lambda: compiled(x, residual), calls, before_replay=lambda: x.copy_(source))
    x.copy_(source)
    return slowest(timing)
