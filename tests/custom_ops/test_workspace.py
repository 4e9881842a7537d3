"""Workspaces between real ranks, with FlashInfer faked: who makes one, when, how often, and what a failure does."""

from __future__ import annotations

import gc
import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import custom_ops
from custom_ops import consensus, domain, workspace
from custom_ops.limits import MIB, Limits
from tests.support.fake_flashinfer import CPU, FakeFlashInfer, faked
from tests.support.ranks import Ranks

BF16, F32 = torch.bfloat16, torch.float32


def group() -> ProcessGroup:
    """A group of all ranks that nothing has used yet."""
    fresh = dist.new_group()
    assert isinstance(fresh, ProcessGroup)
    return fresh


def acquire(on: ProcessGroup, nbytes: int, dtype: torch.dtype = BF16) -> workspace.Workspace | str:
    return workspace.acquire(on, dtype, CPU, nbytes)


def grows() -> None:
    with faked() as fake:
        on = group()
        small = acquire(on, 1000)
        assert isinstance(small, workspace.Workspace)
        assert small.capacity == workspace.MIN_CAPACITY
        assert acquire(on, small.capacity) is small
        assert fake.names == ["build", "create", "probe"]
        large = acquire(on, small.capacity + 1)
        assert isinstance(large, workspace.Workspace)
        assert large.capacity == 2 * small.capacity
        assert acquire(on, 1) is large, "the largest serves everything from now on"
        assert "release" not in fake.names, "captured graphs may hold the smaller one"
        assert acquire(on, 1, torch.float16) is large, "two-byte types share"
        other = acquire(on, 1, F32)
        assert other is not large
        assert [capacity for name, _, capacity in custom_ops.workspaces() if name == on.group_name] == [
            small.capacity, large.capacity, workspace.MIN_CAPACITY,
        ]  # fmt: skip
        assert large.zero_tensor((3, 5), BF16).shape == (3, 5)
        assert not large.zero_tensor((3, 5), BF16).any()


def test_one_per_group_class_and_capacity(ranks: Ranks) -> None:
    ranks.run(grows)


def fails(step: str, on_rank: int) -> tuple[str, list[str], str]:
    mine = {step: f"{step} broke"} if dist.get_rank() == on_rank else {}
    with faked(FakeFlashInfer(fails=mine)) as fake:
        on = group()
        first = acquire(on, 1000)
        steps = fake.names
        assert acquire(on, 1000) == first, "remembered"
        assert acquire(on, 10 * MIB) == first, "a larger one is not tried either"
        assert fake.names == steps
        return str(first), steps, on.group_name


@pytest.mark.parametrize("on_rank", [0, 1])
@pytest.mark.parametrize("step", ["build", "create", "probe"])
def test_one_rank_fails_and_all_go_unfused(ranks: Ranks, step: str, on_rank: int) -> None:
    (first, steps0, _), (second, steps1, _) = ranks.run(fails, step, on_rank)
    assert first == second
    assert f"rank {on_rank} of the group: RuntimeError: {step} broke" in first
    made = [steps for rank, steps in enumerate((steps0, steps1)) if step == "probe" or rank != on_rank]
    for steps in made:
        assert steps.count("release") == steps.count("create"), "what was made is freed again"


@pytest.mark.parametrize("step", ["build", "create", "probe"])
def test_one_of_four_ranks_fails_and_all_go_unfused(four_ranks: Ranks, step: str) -> None:
    found = four_ranks.run(fails, step, 2)
    assert {outcome for outcome, *_ in found} == {f"rank 2 of the group: RuntimeError: {step} broke"}
    for rank, (_, steps, _) in enumerate(found):
        if step == "probe" or rank != 2:
            assert steps.count("release") == steps.count("create"), "what was made is freed again"


def no_room(on_rank: int) -> str:
    with faked(FakeFlashInfer(free=0 if dist.get_rank() == on_rank else 1 << 40)) as fake:
        outcome = acquire(group(), 1000)
        assert not fake.events, "nobody began"
        return str(outcome)


def test_one_rank_has_no_memory(ranks: Ranks) -> None:
    first, second = ranks.run(no_room, 1)
    assert first == second
    assert "rank 1 of the group: the workspace needs" in first


def differ() -> tuple[str | None, Limits]:
    with faked(FakeFlashInfer(facts={"host": f"host{dist.get_rank()}"})):
        state = workspace.state_of(group(), CPU)
        return state.problem, state.limits


def test_ranks_on_two_hosts(ranks: Ranks) -> None:
    (first, limits0), (second, _) = ranks.run(differ)
    assert first == second
    assert first is not None
    assert "host differs: 'host0' on rank 0, 'host1' on rank 1" in first
    assert limits0 == workspace.limits.NONE


def one_without() -> str | None:
    with faked(FakeFlashInfer(version="0.7.4" if dist.get_rank() else None)):
        return workspace.state_of(group(), CPU).problem


def test_one_rank_without_flashinfer(ranks: Ranks) -> None:
    first, second = ranks.run(one_without)
    assert first == second
    assert "flashinfer-python is not installed" in str(first)


def stays_away(timeout: float) -> str | None:
    on = group()
    with faked():
        consensus.agree.__defaults__ = (timedelta(seconds=timeout),)
        try:
            return None if dist.get_rank() else workspace.state_of(on, CPU).problem
        finally:
            consensus.agree.__defaults__ = (consensus.VOTE_TIMEOUT,)


def test_a_rank_that_never_comes(ranks: Ranks) -> None:
    assert "rank [1] of the group did not vote" in str(ranks.run(stays_away, 1.0)[0])


def only_owners() -> list[str]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    with faked() as fake:
        assert isinstance(acquire(mine, 1000), workspace.Workspace)  # type: ignore[arg-type]
        assert fake.names == ["build", "create", "probe"]
        return [name for name, _, _ in custom_ops.workspaces()]


def test_only_the_owners_of_a_group_take_part(four_ranks: Ranks) -> None:
    for names in four_ranks.run(only_owners):
        assert len(names) == len(set(names))


def lifecycle() -> None:
    with faked() as fake:
        custom_ops.destroy()
        fake.events.clear()
        on = group()
        acquire(on, 1000)
        acquire(on, 1000, F32)
        custom_ops.destroy("no such group")
        assert "release" not in fake.names
        for _ in range(2):
            custom_ops.destroy(on.group_name)
            assert fake.names.count("release") == 2
        assert isinstance(acquire(on, 1000), workspace.Workspace), "the next call makes a new one"
        assert fake.names.count("create") == 3
        custom_ops.destroy()
        assert fake.names.count("release") == 3
        acquire(on, 1000)
        dist.destroy_process_group(on)
        del on
        gc.collect()
        assert fake.names.count("release") == 4, "a workspace does not outlive its process group"


def test_destroy_is_idempotent_and_comes_with_the_group(ranks: Ranks) -> None:
    ranks.run(lifecycle)


def in_capture() -> None:
    with faked() as fake:
        on = group()
        fake.capturing = True
        with pytest.raises(
            RuntimeError, match=r"first call.*run one step before the capture, or call custom_ops.prepare"
        ):
            workspace.state_of(on, CPU)
        fake.capturing = False
        acquire(on, 1000)
        fake.capturing = True
        assert isinstance(acquire(on, 1000), workspace.Workspace), "what is there serves in a capture"
        with pytest.raises(RuntimeError, match=r"a message of 9000000 bytes of torch.bfloat16 needs"):
            acquire(on, 9_000_000)
        fake.capturing = False
        fake.fails["create"] = "broke"
        assert isinstance(acquire(on, 9_000_000), str)
        fake.capturing = True
        assert isinstance(acquire(on, 9_000_000), str), "a known failure needs no error"


def test_never_during_capture(ranks: Ranks) -> None:
    ranks.run(in_capture)


def announces() -> list[bool]:
    with faked() as fake:
        acquire(group(), 1000)
        return [detail for name, detail in fake.events if name == "build"]


def test_one_rank_announces_a_compilation(ranks: Ranks) -> None:
    assert ranks.run(announces) == [[True], [False]]


def prepares() -> None:
    cuda = torch.device("cuda")
    with faked() as fake, pytest.MonkeyPatch.context() as patch:
        on = group()
        assert custom_ops.prepare(on.group_name, hidden_size=4096, max_token_num=64, device=CPU) is None
        assert not fake.events, "a CPU needs nothing"
        patch.setattr(workspace, "acquire", lambda *args: acquired.append(args) or "no")
        patch.setattr(workspace.machine, "name", lambda device: "NVIDIA H200")
        acquired: list[tuple[object, ...]] = []
        assert custom_ops.prepare(on.group_name, hidden_size=4096, max_token_num=64, device=cuda) == "no"
        assert acquired[-1][1:] == (BF16, cuda, 64 * 4096 * 2, "trtllm")
        other = {"hidden_size": 4096, "max_token_num": 64, "device": cuda, "backend": "mnnvl"}
        assert custom_ops.prepare(on.group_name, **other) == "no"  # type: ignore[arg-type]
        assert acquired[-1][4] == "mnnvl"
        custom_ops.prepare(on.group_name, hidden_size=4096, max_token_num=1 << 30, device=cuda)
        assert acquired[-1][3] == 32 * MIB, "no more than what runs fused"
        refusal = custom_ops.prepare(on.group_name, hidden_size=4095, max_token_num=64, device=cuda)
        assert "hidden size 4095" in str(refusal)
        with pytest.raises(ValueError, match="group_name='nobody'"):
            custom_ops.prepare("nobody", hidden_size=4096, max_token_num=64)


def test_prepare(ranks: Ranks) -> None:
    ranks.run(prepares)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_capacity_is_a_power_of_two_within_the_kernels_integers(world_size: int) -> None:
    for nbytes in (0, 1, 8 * MIB, 8 * MIB + 1, 8192 * 8192 * 2, 1 << 34):
        capacity = workspace._capacity_for(nbytes, world_size)
        assert capacity & (capacity - 1) == 0
        assert workspace.MIN_CAPACITY <= capacity <= domain.max_capacity(world_size)
        assert capacity >= min(nbytes, domain.max_capacity(world_size))


def one_warning() -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("custom_ops").addHandler(handler)
    with faked(FakeFlashInfer(free=0)):
        on = group()
        for _ in range(5):
            acquire(on, 1000)
    logging.getLogger("custom_ops").removeHandler(handler)
    return messages


def test_a_failure_is_said_once_by_one_rank(ranks: Ranks) -> None:
    first, second = ranks.run(one_warning)
    assert len(first) == 1
    assert "run unfused" in first[0]
    assert second == []
