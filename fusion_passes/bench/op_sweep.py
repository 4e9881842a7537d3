"""All-reduce, add and RMSNorm of a tensor that a kernel has just made, as in a model, by size and path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import custom_ops
import fusion_passes
from fusion_passes.bench import paths
from fusion_passes.bench.timing import Timing, per_call, slowest
from fusion_passes.environment import Environment

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Rows, by default."""

COMPARED = ("fused", "overlap", "symm_mem", paths.STOCK)


@dataclass(frozen=True)
class Point:
    """One size. Times in microseconds per call.

    Attributes:
        tokens: rows.
        hidden: elements of a row.
        itemsize: bytes of an element.
        format: what the norm is quantised to behind it; None where it is not.
        dynamic: whether the number of rows was unknown when it was compiled.
        timings: by path, one of paths.PATHS.
        ran: by path, how the all-reduce ran: a strategy, or "left alone".
    """

    tokens: int
    hidden: int
    itemsize: int
    format: str | None
    dynamic: bool
    timings: dict[str, Timing]
    ran: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return self.tokens * self.hidden * self.itemsize

    def ratio(self, path: str) -> float:
        """How many times faster than stock."""
        return self.timings[paths.STOCK].median / self.timings[path].median


def _static(x: Tensor, scale: Tensor) -> Any:
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def _per_token(x: Tensor, scale: Tensor) -> Any:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return _static(x, scale), scale


FORMATS: dict[str, Callable[[Tensor, Tensor], Any]] = {"fp8": _static, "fp8_token": _per_token}
"""Quantisations in plain PyTorch, which Inductor makes one kernel of with the norm."""


class Chain:
    """The measured function for one hidden size and type; its weights are shared by all paths and sizes.

    Args:
        hidden: elements of a row.
        dtype: of the activations.
        format: one of FORMATS, or None.
    """

    def __init__(self, hidden: int, dtype: torch.dtype = torch.bfloat16, format: str | None = None) -> None:
        self.hidden, self.dtype, self.format = hidden, dtype, format
        self.norm = torch.nn.RMSNorm(hidden, device="cuda", dtype=dtype)
        self.gate, self.scale = torch.ones((), device="cuda", dtype=dtype), torch.tensor(0.02, device="cuda")

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor]:
        """(x, residual) of [tokens, hidden]."""
        x, residual = (torch.randn(tokens, self.hidden, device="cuda", dtype=self.dtype) for _ in range(2))
        return x, residual

    def __call__(self, x: Tensor, residual: Tensor) -> Any:
        """(norm, or its quantisation; new residual)."""
        # Made here, as a product is in a model: stock reduces it where it lies.
        made = x * self.gate
        total = residual + funcol.all_reduce(made, "sum", dist.group.WORLD)  # type: ignore[arg-type]
        normed = self.norm(total)
        return (normed if self.format is None else FORMATS[self.format](normed, self.scale)), total

    def compiled(
        self, path: str, dynamic: bool = False, environment: Environment | None = None
    ) -> Callable[[Tensor, Tensor], Any]:
        """The chain compiled on a path; sizes compile at the first call."""
        torch._dynamo.reset()

        def fn(x: Tensor, residual: Tensor) -> Any:
            return self(x, residual)

        options = paths.options(path, environment=environment)
        return torch.compile(fn, fullgraph=True, dynamic=dynamic, options=options or None)


def time(fn: Callable[[Tensor, Tensor], Any], x: Tensor, residual: Tensor) -> Timing:
    """Microseconds a call under CUDA graphs, of the slowest rank."""
    for _ in range(3):
        fn(x, residual)
    return slowest(per_call(lambda: fn(x, residual), 20 if x.numel() <= 1 << 22 else 5))


def sweep(
    hidden: int,
    tokens: Sequence[int] = TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    format: str | None = None,
    compared: Sequence[str] = COMPARED,
    dynamic: bool = False,
) -> Iterator[Point]:
    """Measure all sizes on the current GPUs, one after the other; collective over the default group.

    Args:
        hidden: elements of a row.
        tokens: rows.
        dtype: of the activations.
        format: quantise the norm behind it, or not (None).
        compared: paths, one of them stock.
        dynamic: compile each path once, for any number of rows.
    """
    chain = Chain(hidden, dtype, format)
    kept = {path: chain.compiled(path, dynamic=True) for path in compared} if dynamic else {}
    with torch.inference_mode():
        for count in tokens:
            x, residual = chain.inputs(count)
            timings, ran = {}, {}
            for path in compared:
                fn = kept.get(path) or chain.compiled(path)
                custom_ops.reset_launches()
                fusion_passes.reset_report()
                timings[path] = time(fn, x, residual)
                ran[path] = "/".join(sorted(one.strategy.value for one in custom_ops.launches())) or "left alone"
            yield Point(count, hidden, dtype.itemsize, format, dynamic, timings, ran)
