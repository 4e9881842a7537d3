"""This rank's share of some decoder layers, in the shape of well-known models, as people write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the whole model; the default is Llama 3.1 8B with fewer layers and a short context.

    Attributes:
        hidden: hidden size.
        intermediate: of the MLP, or of one expert.
        heads: of queries.
        kv_heads: of keys and values.
        layers: decoder layers.
        context: length of the full key-value cache; 0 for a prefill, which attends to its own tokens only.
        head: size of a head; 0 for hidden / heads.
        qk_norm: whether queries and keys are normed per head.
        sandwich: Gemma's layers: a norm behind each sum, too, weights stored less one, and GELU.
        experts: of a mixture; 0 for one MLP.
        chosen: experts that each token goes to.
    """

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    layers: int = 8
    context: int = 128
    head: int = 0
    qk_norm: bool = False
    sandwich: bool = False
    experts: int = 0
    chosen: int = 0

    @property
    def head_size(self) -> int:
        """Size of a head."""
        return self.head or self.hidden // self.heads

    def angles(self, tokens: int) -> Tensor:
        """Rotations of a step, [1, head / 2], or of a prefill, [tokens, 1, head / 2]."""
        return torch.rand(self.head_size // 2) if self.context else torch.rand(tokens, 1, self.head_size // 2)


MODELS = {
    "llama-8b": Shape(),
    "qwen3-30b-a3b": Shape(2048, 768, 32, 4, head=128, qk_norm=True, experts=128, chosen=8),
    "gemma3-12b": Shape(3840, 15360, 16, 8, head=256, qk_norm=True, sandwich=True),
}
"""Shapes by name."""


class ShiftedNorm(nn.Module):
    """Gemma's RMSNorm: multiplied by one plus its weight."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """The norm of [..., hidden]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


def _norm(shape: Shape, size: int) -> nn.Module:
    return ShiftedNorm(size, 1e-5) if shape.sandwich else nn.RMSNorm(size, eps=1e-5)


class Attention(nn.Module):
    """Grouped-query attention with a full cache of fixed length, or over the tokens themselves."""

    def __init__(self, shape: Shape, batch: int, ranks: int) -> None:
        super().__init__()
        self.head, self.context = shape.head_size, shape.context
        self.heads, self.kv_heads = shape.heads // ranks, shape.kv_heads // ranks
        self.qkv = nn.Linear(shape.hidden, (self.heads + 2 * self.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(self.heads * self.head, shape.hidden, bias=False)
        self.q_norm, self.k_norm = (_norm(shape, self.head) if shape.qk_norm else nn.Identity() for _ in range(2))
        self.cache = nn.Buffer(torch.randn(2, batch, self.kv_heads, max(shape.context, 1), self.head))

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """This rank's contribution to [tokens, hidden]; each token is a sequence, or all are one (a prefill)."""
        tokens = x.shape[0]
        query, key, value = (
            self.qkv(x).view(tokens, -1, self.head).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        )
        query, key = (_rotate(norm(one), angles) for norm, one in ((self.q_norm, query), (self.k_norm, key)))
        if self.context:
            self.cache[..., -1, :] = torch.stack([key, value])
            attended = F.scaled_dot_product_attention(query.unsqueeze(2), self.cache[0], self.cache[1], enable_gqa=True)
        else:
            query, key, value = (one.transpose(0, 1).unsqueeze(0) for one in (query, key, value))
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            attended = attended.transpose(1, 2)
        return self.out(attended.reshape(tokens, -1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Gated MLP, columns and then rows split between the ranks."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        self.gelu = shape.sandwich
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate // ranks, bias=False)
        self.down = nn.Linear(shape.intermediate // ranks, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's contribution to [tokens, hidden]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        active = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return self.down(active * up)  # type: ignore[no-any-return]


class Mixture(nn.Module):
    """Gated MLPs of which a router chooses some for each token; every rank has a share of each."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        self.chosen, inner = shape.chosen, shape.intermediate // ranks
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(shape.experts, shape.hidden, 2 * inner) / shape.hidden**0.5)
        self.down = nn.Parameter(torch.randn(shape.experts, inner, shape.hidden) / inner**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's contribution to [tokens, hidden]."""
        weights, experts = self.router(x).float().softmax(-1).topk(self.chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = experts.flatten()
        order = flat.argsort()
        kinds = torch.arange(self.router.out_features, device=x.device)
        ends = (flat.unsqueeze(-1) == kinds).sum(0).cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x[order // self.chosen], self.gate_up, offs=ends).chunk(2, dim=-1)
        made = F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)
        made = made[order.argsort()].view(x.shape[0], self.chosen, -1)
        return (made * weights.unsqueeze(-1).to(x.dtype)).sum(1)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One decoder layer; its first norm belongs to the layer before."""

    def __init__(self, shape: Shape, batch: int, ranks: int) -> None:
        super().__init__()
        self.input_norm, self.post_norm = _norm(shape, shape.hidden), _norm(shape, shape.hidden)
        self.attention = Attention(shape, batch, ranks)
        self.mlp = Mixture(shape, ranks) if shape.experts else MLP(shape, ranks)
        self.sum_norms = nn.ModuleList(
            _norm(shape, shape.hidden) if shape.sandwich else nn.Identity() for _ in range(2)
        )

    def forward(self, normed: Tensor, residual: Tensor, angles: Tensor, next_norm: nn.Module) -> tuple[Tensor, Tensor]:
        """(norm for the next layer, residual) of [tokens, hidden]."""
        after_attention, after_mlp = self.sum_norms
        residual = residual + after_attention(_all_reduce(self.attention(normed, angles)))
        residual = residual + after_mlp(_all_reduce(self.mlp(self.post_norm(residual))))
        return next_norm(residual), residual


class Stack(nn.Module):
    """This rank's share of some decoder layers."""

    def __init__(self, shape: Shape, batch: int, ranks: int) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Block(shape, batch, ranks) for _ in range(shape.layers))
        self.final_norm = _norm(shape, shape.hidden)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """Hidden states of [tokens, hidden]; angles are those of the shape."""
        blocks = list(self.layers)
        normed, residual = blocks[0].input_norm(x), x  # type: ignore[operator]
        for index, block in enumerate(blocks):
            following = blocks[index + 1].input_norm if index + 1 < len(blocks) else self.final_norm
            normed, residual = block(normed, residual, angles, following)
        return normed  # type: ignore[no-any-return]


def _all_reduce(x: Tensor) -> Tensor:
    total: Tensor = funcol.all_reduce(x, "sum", dist.group.WORLD)  # type: ignore[arg-type]
    return total


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
