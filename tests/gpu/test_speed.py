"""What speed rests on: nothing allocated but outputs, nothing copied, nothing wrong without synchronisation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import custom_ops
import fusion_passes
from custom_ops import limits, workspace
from custom_ops import profile as profile_module
from custom_ops.limits import Limits
from fusion_passes import FusionConfig, compat
from fusion_passes.bench import stress, tune
from fusion_passes.bench.stress import Stressed
from tests.support import gpu
from tests.support.gpu import EPS, case
from tests.support.ranks import Ranks


def allocations(call: Callable[[], object]) -> int:
    """Tensors that a call allocates once it is warm."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


def counted(tokens: int) -> list[int]:
    one = case(tokens, 4096)
    outputs = one.outputs()
    return [
        allocations(lambda: one.call(*outputs)),
        allocations(lambda: one.call(*outputs, residual=False)),
        allocations(lambda: custom_ops.flashinfer_all_reduce(one.x)),
        allocations(lambda: custom_ops.flashinfer_all_reduce_(one.x)),
    ]


@pytest.mark.parametrize("tokens", [1, 17, 1024])
def test_nothing_is_allocated_but_outputs(gpus: Ranks, tokens: int) -> None:
    """With a residual or without: the zeros that stand for it are kept."""
    for found in gpus.run(counted, tokens):
        assert found == [0, 0, 1, 0]


def in_place(path: str, most: int) -> list[tuple[int, str, int]]:
    """Of products of an unknown number of rows: rows, how the all-reduce ran, and allocations beside the outputs."""
    world, hidden = dist.group.WORLD, 2048
    state = workspace.state_of(world, gpu.device())  # type: ignore[arg-type]
    before = state.limits
    state.limit_to(Limits(most * hidden * 2, most * hidden * 2, "test"))
    norm = torch.nn.RMSNorm(hidden, EPS, device=gpu.device(), dtype=torch.bfloat16)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + funcol.all_reduce(x * 2, "sum", world)  # type: ignore[arg-type]
        return norm(total), total

    found = []
    options = fusion_passes.options(FusionConfig(norm_path=path))  # type: ignore[arg-type]
    with torch.inference_mode(), compat.without_caches():
        fn = torch.compile(block, fullgraph=True, dynamic=True, options=options)
        for tokens in (most - 1, most, most + 1, 2 * most):
            one = case(tokens, hidden, seed=tokens)
            one.x.div_(2)
            norm.weight.copy_(one.gamma)
            made = allocations(lambda one=one: fn(one.x, one.residual))  # type: ignore[misc]
            custom_ops.reset_launches()
            normed, total = fn(one.x, one.residual)
            one.x.mul_(2)
            one.check(normed, total, bound=0.51 if path == "fused" else 3.0)
            (launch,) = custom_ops.launches()
            found.append((tokens, launch.strategy.value, made))
    state.limit_to(before)
    return found


@pytest.mark.parametrize("path", ["fused", "overlap"])
def test_unknown_size_above_the_limit_needs_no_copy(gpus: Ranks, path: str) -> None:
    for found in gpus.run(in_place, path, 64):
        assert [ran for _, ran, _ in found] == ["one_shot", "one_shot", "unfused", "unfused"]
        # Fused: the product, which becomes the residual, and the norm. Overlap: the product, norm, residual.
        assert {made for *_, made in found} == {2 if path == "fused" else 3}


def stressed(calls: int, eager: int) -> list[Stressed]:
    return stress.run(calls, eager_calls=eager)


def test_no_wrong_value_without_synchronisation(gpus: Ranks) -> None:
    """New data, poisoned outputs, PDL-launched consumers, both triggers, both strategies, captured and eager."""
    alone = torch.cuda.device_count() > 1
    for found in gpus.run(stressed, 120_000 if alone else 2_000, 15_000 if alone else 500, timeout=300):
        assert {one.trigger for one in found} == {"early", "late"}
        assert sum(one.calls for one in found) >= (120_000 if alone else 2_000)
        assert [one for one in found if one.wrong] == []


def tuned() -> tuple[str, bool]:
    before = workspace.state_of(dist.group.WORLD, gpu.device()).limits  # type: ignore[arg-type]
    profile = tune.measure([2048], [1, 16], [torch.bfloat16])
    same = workspace.state_of(dist.group.WORLD, gpu.device()).limits == before  # type: ignore[arg-type]
    return profile.to_json(), same


def test_tuning_measures_and_leaves_the_limits_as_they_were(gpus: Ranks) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("ranks that share a GPU cannot capture their own all-reduce")
    found = gpus.run(tuned, timeout=240)
    assert len(set(found)) == 1, "all ranks write the same profile"
    text, same = found[0]
    assert same
    profile = profile_module.parse(text)
    assert [(point.tokens, point.hidden) for point in profile.points] == [(1, 2048), (16, 2048)]
    assert profile.refusal(torch.cuda.get_device_name(), str(torch.__version__), profile.flashinfer) is None
    assert limits.choose(profile.limits, 16, 2048, 2, gpus.world_size).value in ("one_shot", "two_shot", "unfused")
