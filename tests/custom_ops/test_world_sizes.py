"""What depends on the number of ranks: the decision for each size, and values between four and eight of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import custom_ops
from custom_ops import consensus, domain, limits, rank_check
from custom_ops.limits import Strategy
from custom_ops.ready import Tensors
from tests.support.ranks import Ranks

OP = torch.ops.custom_ops.call_trtllm_fused_allreduce_norm
HIDDEN = 256
NEW = "NVIDIA of tomorrow"

# (world size, largest message of a device that nobody has measured, in KiB, why none runs fused)
TABLE = [
    (1, 0, "world size 1: the kernel serves (2, 4, 8, 16)"),
    (2, 16 << 10, None),
    (3, 0, "world size 3: the kernel serves (2, 4, 8, 16)"),
    (4, 2 << 10, None),
    (8, 512, None),
    (16, 256, None),
]


@pytest.mark.parametrize(("world_size", "kib", "refusal"), TABLE)
def test_decision(world_size: int, kib: int, refusal: str | None) -> None:
    assert domain.shape_refusal(4096, torch.bfloat16, world_size) == refusal
    found = limits.for_device(NEW, world_size)
    most = kib * 1024 // (4096 * 2)
    for tokens in sorted({0, 1, world_size - 1, world_size, world_size + 1, 16, 17, most, most + 1}):
        strategy = limits.choose(found, tokens, 4096, 2, world_size)
        assert strategy is (Strategy.ONE_SHOT if tokens <= most else Strategy.UNFUSED), tokens


@pytest.mark.parametrize("world_size", domain.WORLD_SIZES)
def test_two_shot_begins_behind_one_shot_and_above_the_number_of_ranks(world_size: int) -> None:
    found = limits.Limits(0, 1 << 30, "test")
    for tokens in range(1, 2 * world_size + 1):
        wanted = Strategy.TWO_SHOT if tokens > world_size else Strategy.UNFUSED
        assert limits.choose(found, tokens, 4096, 2, world_size) is wanted


def exact(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The residual behind the op: the sum over ranks in order, rounded once, and an addition."""
    group = dist.group.WORLD
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x, group=group)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(x.dtype) + residual


def values(tokens: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    same = torch.Generator().manual_seed(1000)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    residual, gamma = torch.randn(tokens, HIDDEN, generator=same).bfloat16(), torch.ones(HIDDEN).bfloat16()
    norm, total = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    OP(x, residual, gamma, 1e-6, dist.get_world_size(), True, True, 0, 1, norm, residual_out=total)
    expected = exact(x, residual)
    assert torch.equal(total, expected)
    wide = expected.double()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(norm.double(), normed, rtol=2**-8, atol=1e-6)
    plain = custom_ops.flashinfer_all_reduce(x)
    torch.testing.assert_close(plain.float(), (expected.float() - residual.float()), rtol=0.02, atol=0.1)


@pytest.mark.parametrize("tokens", [3, 4, 5])
def test_values_of_four(four_ranks: Ranks, tokens: int) -> None:
    four_ranks.run(values, tokens)


@pytest.mark.parametrize("tokens", [7, 8, 9])
def test_values_of_eight(eight_ranks: Ranks, tokens: int) -> None:
    eight_ranks.run(values, tokens)


def of_two_and_four() -> list[float]:
    """Sums over groups of a mesh of 2 x 4, whose ranks are one, two, four, ... each."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    found = []
    for name in ("tp", "dp"):
        group = mesh[name].get_group()
        x = torch.full((4, 64), 2.0 ** dist.get_rank())
        norm, total = torch.empty_like(x), torch.empty_like(x)
        OP(x, None, None, 1e-6, group.size(), True, True, 0, 1, norm, residual_out=total, group_name=group.group_name)
        found.append(total.max().item())
    return found


def test_groups_of_a_mesh_of_eight(eight_ranks: Ranks) -> None:
    expected = [
        [sum(2.0**peer for peer in range(rank // 4 * 4, rank // 4 * 4 + 4)), 2.0 ** (rank % 4) * 17]
        for rank in range(8)
    ]
    assert eight_ranks.run(of_two_and_four) == expected


def votes() -> list[str | None]:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    return [
        consensus.agree(group, "eight agree", {"a": 1}, None),
        consensus.agree(group, "one of eight cannot", {}, "no memory" if rank == 5 else None),
        consensus.agree(group, "one of eight differs", {"a": rank == 7}, None),
    ]


def test_votes_of_eight(eight_ranks: Ranks) -> None:
    found = eight_ranks.run(votes)
    assert (
        found
        == [[None, "rank 5 of the group: no memory", "a differs: False on rank 0, True on rank 7 of the group"]] * 8
    )


def differs() -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        rank_check.require_equal(group, "op", Tensors(torch.empty(4 + (dist.get_rank() == 6), 64)), ())
    except RuntimeError as error:
        return str(error)
    return ""


def test_one_of_eight_with_another_size(eight_ranks: Ranks) -> None:
    found = eight_ranks.run(differs)
    assert len(set(found)) == 1
    assert "[[5, 64], 'torch.float32', 'cpu'] on rank 6" in found[0]
