"""One decoding step of a Llama-shaped tensor-parallel stack under CUDA graphs, fused against stock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.bench.float8_linear import quantise_linears
from fusion_passes.bench.timing import Timing, per_call, slowest


@dataclass(frozen=True)
class Shape:
    """Sizes of the whole model; the default is Llama 3.1 8B with fewer layers and a short context."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 8
    context: int = 128


class Block(nn.Module):
    """This rank's share of one decoder layer, with a full key-value cache of fixed length."""

    def __init__(self, shape: Shape, batch: int, ranks: int) -> None:
        super().__init__()
        self.head = shape.hidden // shape.heads
        self.heads, self.kv_heads = shape.heads // ranks, shape.kv_heads // ranks
        self.input_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.qkv = nn.Linear(shape.hidden, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, shape.hidden, bias=False)
        self.post_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate // ranks, bias=False)
        self.down = nn.Linear(shape.intermediate // ranks, shape.hidden, bias=False)
        self.cache = nn.Buffer(torch.randn(2, batch, self.kv_heads, shape.context, self.head))

    def forward(self, normed: Tensor, residual: Tensor, angles: Tensor, next_norm: nn.Module) -> tuple[Tensor, Tensor]:
        """(norm for the next layer, residual) of a step of [batch, hidden]."""
        batch = normed.shape[0]
        qkv = self.qkv(normed).view(batch, -1, 1, self.head)
        query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        self.cache[..., -1:, :] = torch.stack([_rotate(key, angles), value])
        query, keys, values = _rotate(query, angles), self.cache[0], self.cache[1]
        attended = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        residual = residual + _all_reduce(self.out(attended.reshape(batch, -1)))
        gate, up = self.gate_up(self.post_norm(residual)).chunk(2, dim=-1)
        residual = residual + _all_reduce(self.down(F.silu(gate) * up))
        return next_norm(residual), residual


class Stack(nn.Module):
    """This rank's share of some decoder layers."""

    def __init__(self, shape: Shape, batch: int, ranks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape, batch, ranks) for _ in range(shape.layers))
        self.final_norm = nn.RMSNorm(shape.hidden, eps=1e-5)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Hidden states of a step of [batch, hidden]."""
        blocks = list(self.layers)
        normed, residual = blocks[0].input_norm(x), x  # type: ignore[operator]
        for index, block in enumerate(blocks):
            following = blocks[index + 1].input_norm if index + 1 < len(blocks) else self.final_norm
            normed, residual = block(normed, residual, angles, following)
        return normed  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Step:
    """Microseconds per layer of one decoding step.

    Attributes:
        batch: sequences.
        linears: type of the linear layers: "bf16", "fp8" (static scales) or "fp8_token".
        stock: torch.compile.
        norms: torch.compile with the pass, quantisation left to Inductor; None without quantisation.
        fused: torch.compile with the pass.
        sites: all-reduces that were fused.
        rules: how many fused by which rule.
        max_difference: largest difference of an output value between stock and fused.
    """

    batch: int
    linears: str
    stock: Timing
    norms: Timing | None
    fused: Timing
    sites: int
    rules: dict[str, int]
    max_difference: float


LINEARS = ("bf16", "fp8", "fp8_token")


def measure(batch: int, shape: Shape | None = None, config: FusionConfig | None = None, linears: str = "bf16") -> Step:
    """Measure one batch size on the current GPUs; collective over the default group."""
    config = config or FusionConfig()
    shape = shape or Shape()
    torch.manual_seed(dist.get_rank())
    with torch.device("cuda"), torch.inference_mode():
        stack = Stack(shape, batch, dist.get_world_size()).to(torch.bfloat16)
        if linears != "bf16":
            quantise_linears(stack, per_token=linears == "fp8_token")
        torch.manual_seed(1)
        x = torch.randn(batch, shape.hidden).to(torch.bfloat16)
        angles = torch.rand(stack.layers[0].head // 2)  # type: ignore[arg-type, operator]
        fusion_passes.reset_report()
        fused, after = _time(stack, x, angles, fusion_passes.options(config))
        rules = Counter(site.rule for site in fusion_passes.report() if site.rule)
        norms = None
        if linears != "bf16":
            only_norms = fusion_passes.options(replace(config, fuse_quantisation=False))
            norms = _per_layer(_time(stack, x, angles, only_norms)[0], shape)
        stock, before = _time(stack, x, angles, {})
    difference = (after.float() - before.float()).abs().max().item()
    timings = _per_layer(stock, shape), norms, _per_layer(fused, shape)
    return Step(batch, linears, *timings, rules.total(), dict(rules), difference)


def _time(stack: Stack, x: Tensor, angles: Tensor, options: dict[str, Any]) -> tuple[Timing, Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(stack, fullgraph=True, dynamic=False, options=options or None)
    for _ in range(3):
        result = compiled(x, angles)
    return slowest(per_call(lambda: compiled(x, angles), calls=10)), result


def _per_layer(timing: Timing, shape: Shape) -> Timing:
    return Timing(timing.median / shape.layers, timing.low / shape.layers, timing.high / shape.layers)


def _all_reduce(x: Tensor) -> Tensor:
    total: Tensor = funcol.all_reduce(x, "sum", dist.group.WORLD)  # type: ignore[arg-type]
    return total


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
