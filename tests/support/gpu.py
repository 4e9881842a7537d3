"""What the GPU tests share: inputs, the independent result, and the comparison."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
from custom_ops import limits, machine
from tests.support.ulp import distance

EPS = 1e-6
OP = torch.ops.custom_ops.call_trtllm_fused_allreduce_norm


def device() -> torch.device:
    """This rank's GPU."""
    return torch.device("cuda", torch.cuda.current_device())


@dataclass
class Case:
    """Inputs of one call; x differs from rank to rank, the rest does not."""

    x: Tensor
    residual: Tensor
    gamma: Tensor

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Two tensors filled with NaN, so that what is not written shows."""
        return torch.full_like(self.x, float("nan")), torch.full_like(self.x, float("nan"))

    def call(self, norm_out: Tensor, residual_out: Tensor, *, residual: bool = True, **changes: object) -> None:
        """The fused op."""
        other = self.residual if residual else None
        arguments = (self.x, other, self.gamma, EPS, dist.get_world_size(), True, True, 0, 1, norm_out)
        OP(*arguments, residual_out=residual_out, **changes)

    def check(self, norm: Tensor, total: Tensor, *, residual: bool = True, bound: float = 0.51) -> None:
        """Compare with NCCL, an addition, and, within a bound in ulp, the norm in float64."""
        reduced = self.x.clone()
        dist.all_reduce(reduced)
        expected = reduced + self.residual if residual else reduced
        if dist.get_world_size() == 2:
            assert torch.equal(total, expected), "the residual equals NCCL and add bit for bit"
        else:
            slack = 2 * torch.finfo(total.dtype).eps
            torch.testing.assert_close(total.float(), expected.float(), rtol=slack, atol=slack * dist.get_world_size())
        if not total.numel():
            return
        wide = total.double()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * self.gamma.double()
        found = distance(norm, exact, exact, total.dtype)
        assert found <= (bound if total.dtype.itemsize == 2 else 8.0), f"{found} ulp, {list(total.shape)}"


def case(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Case:
    """Random inputs of one shape."""
    same = torch.Generator(device()).manual_seed(seed)
    own = torch.Generator(device()).manual_seed(1000 + 100 * seed + dist.get_rank())
    residual = torch.randn(shape, generator=same, device=device()).to(dtype)
    gamma = torch.randn(shape[-1], generator=same, device=device()).to(dtype)
    return Case(torch.randn(shape, generator=own, device=device()).to(dtype), residual, gamma)


def limit(hidden: int, itemsize: int = 2) -> int:
    """The largest number of tokens that runs fused."""
    found = limits.for_device(machine.name(device()), dist.get_world_size())
    found = found.at(hidden)
    return max(found.one_shot_bytes, found.two_shot_bytes) // (hidden * itemsize)


def token_counts(hidden: int) -> list[int]:
    """The sizes where something changes: ranks, PDL threshold, blocks, limit."""
    size, most = dist.get_world_size(), limit(hidden)
    return sorted({0, 1, 2, 3, size - 1, size, size + 1, 16, 17, 128, 129, 1024, 4096, most, most + 1})


def ran() -> dict[str, int]:
    """How the calls since the last reset ran."""
    summary: Counter[str] = Counter()
    for launch, count in custom_ops.launches().items():
        trigger = "late" if launch.completion_at_end else "early"
        summary[launch.reason or f"{launch.strategy.value}, {trigger} trigger"] += count
    return dict(summary)
