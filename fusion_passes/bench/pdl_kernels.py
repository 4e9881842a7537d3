"""Kernels around an all-reduce that are launched with programmatic dependent launch (Triton, CUDA only)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def projection(x: Tensor, weight: Tensor, out: Tensor, pdl: bool, rows: int) -> None:
    """out = x @ weight.T for few tokens, as a router does it: weights are read before the predecessor is waited for.

    Args:
        x: [tokens, hidden], contiguous.
        weight: [features, hidden], contiguous, same dtype; features are a multiple of rows.
        out: float32 [tokens, features].
        pdl: launch with PDL; otherwise it starts when its predecessor has ended.
        rows: features of one block.
    """
    tokens, hidden = x.shape
    features = weight.shape[0]
    grid, block = (features // rows,), triton.next_power_of_2(hidden)
    extra = {"launch_pdl": True} if pdl else {}
    _projection[grid](
        x, weight, out, hidden, features, TOKENS=tokens, PDL=pdl, ROWS=rows, BLOCK=block, num_warps=8, **extra
    )


@triton.jit
def _projection(
    x, weight, out, hidden, features, TOKENS: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    mine = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    weights = tl.load(weight + mine[:, None] * hidden + columns[None, :], mask=inside[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for token in range(TOKENS):
        row = tl.load(x + token * hidden + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * features + mine, tl.sum(weights.to(tl.float32) * row[None, :], 1))


def echo(norm: Tensor, total: Tensor, out: Tensor, pdl: bool = True) -> None:
    """out = norm + 2 * total in float32, all of one contiguous shape: shows what a consumer saw of its predecessor."""
    count, block = norm.numel(), 1024
    extra = {"launch_pdl": True} if pdl else {}
    _echo[(triton.cdiv(count, block),)](norm, total, out, count, PDL=pdl, BLOCK=block, **extra)


@triton.jit
def _echo(norm, total, out, count, PDL: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    seen = tl.load(norm + places, mask=inside, other=0.0).to(tl.float32)
    seen += 2 * tl.load(total + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, seen, mask=inside)


SPREAD = 8.0
"""Values are drawn from minus to plus half of this."""


def refill(counter: Tensor, slot: int, rank: int, x: Tensor, residual: Tensor, poisoned: tuple[Tensor, ...]) -> None:
    """New values for x (of this rank) and residual (of all), and NaN for what is to be written.

    Args:
        counter: int64 [1]; another number makes other values.
        slot: makes them differ within one number.
        rank: makes x differ from rank to rank.
        x: 16-bit [tokens, hidden].
        residual: likewise.
        poisoned: three tensors of as many elements, the third float32.
    """
    count, block = x.numel(), 1024
    _refill[(triton.cdiv(count, block),)](counter, slot, rank, x, residual, *poisoned, count, SPREAD, BLOCK=block)


@triton.jit
def _drawn(counter, slot, stream, places, SPREAD: tl.constexpr):
    seed = tl.load(counter) * 64 + slot
    return ((tl.rand(seed, places * 32 + stream) - 0.5) * SPREAD).to(tl.bfloat16)


@triton.jit
def _refill(
    counter, slot, rank, x, residual, norm_out, residual_out, out, count, SPREAD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(x + places, _drawn(counter, slot, rank, places, SPREAD), mask=inside)
    tl.store(residual + places, _drawn(counter, slot, 31, places, SPREAD), mask=inside)
    for_norm = tl.full([BLOCK], float("nan"), tl.float32)
    tl.store(norm_out + places, for_norm.to(tl.bfloat16), mask=inside)
    tl.store(residual_out + places, for_norm.to(tl.bfloat16), mask=inside)
    tl.store(out + places, for_norm, mask=inside)


def count_wrong(
    counter: Tensor, slot: int, ranks: int, eps: float, norm: Tensor, total: Tensor, seen: Tensor, wrong: Tensor
) -> None:
    """Add to wrong, int64 [1], how many values differ from what this rank alone computes from everybody's inputs.

    The new residual must be equal bit for bit between two ranks; norm and what the consumer saw may differ by 2 ulp.
    """
    tokens, hidden = norm.shape
    block = triton.next_power_of_2(hidden)
    _count_wrong[(tokens,)](
        counter, slot, hidden, eps, norm, total, seen, wrong, SPREAD, RANKS=ranks, BLOCK=block, num_warps=8
    )


@triton.jit
def _count_wrong(
    counter, slot, hidden, eps, norm, total, seen, wrong,
    SPREAD: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    places = tl.program_id(0) * hidden + columns
    summed = tl.zeros([BLOCK], tl.float32)
    for rank in range(RANKS):
        summed += _drawn(counter, slot, rank, places, SPREAD).to(tl.float32)
    summed = summed.to(tl.bfloat16).to(tl.float32) + _drawn(counter, slot, 31, places, SPREAD).to(tl.float32)
    expected = tl.where(inside, summed.to(tl.bfloat16).to(tl.float32), 0.0)
    normed = expected * tl.rsqrt(tl.sum(expected * expected) / hidden + eps)
    found_total = tl.load(total + places, mask=inside, other=0.0).to(tl.float32)
    found_norm = tl.load(norm + places, mask=inside, other=0.0).to(tl.float32)
    found_seen = tl.load(seen + places, mask=inside, other=0.0)
    slack = 0.016 * tl.abs(normed) + 1e-6
    # Written so that NaN is wrong, too.
    right = (found_total == expected) & (tl.abs(found_norm - normed) <= slack)
    right = right & (tl.abs(found_seen - (normed + 2 * expected)) <= slack + 1e-5 * tl.abs(expected))
    count = tl.sum(tl.where(inside & (right == 0), 1, 0))
    tl.atomic_add(wrong, count.to(tl.int64))


def nap(cycles: int) -> None:
    """Keep the stream busy: this rank comes late to what follows."""
    torch.cuda._sleep(cycles)
