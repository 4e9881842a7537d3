"""The plan of a call, with FlashInfer faked: strategy, flags and the reason where it runs unfused."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from custom_ops import dispatch, machine, workspace
from custom_ops.counters import Launch
from custom_ops.dispatch import Flags, Message
from custom_ops.formats import FORMATS, Quantisation
from custom_ops.limits import MIB, Limits, Strategy
from tests.support.fake_flashinfer import CPU, FakeFlashInfer, faked
from tests.support.ranks import Ranks


def plan(
    on: ProcessGroup, tokens: int, hidden: int = 4096, dtype: torch.dtype = torch.bfloat16, **flags: int
) -> Launch:
    asked = Flags(**{"launch_with_pdl": True, "fp32_acc": True, "advance_launch_tokens": 16, **flags})  # type: ignore[arg-type]
    return dispatch.plan("op", 1, Message(tokens, hidden, dtype, CPU), on, asked)[0]


def fused() -> None:
    with faked():
        on = dist.new_group()
        assert plan(on, 1) == Launch("op", "cuda", 1, Strategy.ONE_SHOT, launch_with_pdl=True, completion_at_end=False)
        assert plan(on, 16).completion_at_end is False
        assert plan(on, 17).completion_at_end is True
        assert plan(on, 16, advance_launch_tokens=0).completion_at_end is True
        assert plan(on, 64, advance_launch_tokens=64).completion_at_end is False
        assert plan(on, 1, launch_with_pdl=False).launch_with_pdl is False
        assert plan(on, 4096).strategy is Strategy.ONE_SHOT, "the limit of the table"


def test_flags_and_strategy(ranks: Ranks) -> None:
    ranks.run(fused)


def two_shot() -> None:
    with faked():
        on = dist.new_group()
        workspace.state_of(on, CPU).limits = Limits(MIB, 4 * MIB, "test")
        assert plan(on, 128).strategy is Strategy.ONE_SHOT
        assert plan(on, 129).strategy is Strategy.TWO_SHOT
        assert plan(on, 129, advance_launch_tokens=1000).completion_at_end is True
        assert plan(on, 512).strategy is Strategy.TWO_SHOT
        assert plan(on, 513).strategy is Strategy.UNFUSED


def test_two_shot_triggers_late(ranks: Ranks) -> None:
    ranks.run(two_shot)


def one_shot_only() -> None:
    with faked():
        on = dist.new_group()
        workspace.state_of(on, CPU).limits = Limits(MIB, 4 * MIB, "test")
        assert plan(on, 128, one_shot_only=True).strategy is Strategy.ONE_SHOT
        assert plan(on, 129, one_shot_only=True).strategy is Strategy.UNFUSED


def test_one_shot_alone_where_algorithms_are_deterministic(ranks: Ranks) -> None:
    ranks.run(one_shot_only)


def unfused() -> None:
    with faked() as fake:
        on = dist.new_group()
        for launch, reason in {
            plan(on, 1, hidden=4095): "hidden size 4095",
            plan(on, 1, dtype=torch.float64): "float64",
            plan(on, 65, max_token_num=64): "max_token_num",
            plan(on, 4097): "above the limit",
        }.items():
            assert launch.strategy is Strategy.UNFUSED
            assert reason in launch.reason
            assert launch.launch_with_pdl is False
            assert launch.completion_at_end is True
        assert not fake.events, "no workspace for what needs none"
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        assert "world size 1" in plan(alone, 1).reason


def test_unfused_with_a_reason(ranks: Ranks) -> None:
    ranks.run(unfused)


def no_memory() -> None:
    with faked(FakeFlashInfer(free=0)):
        assert "the workspace needs" in plan(dist.new_group(), 1).reason


def test_unfused_where_no_workspace_can_be_made(ranks: Ranks) -> None:
    ranks.run(no_memory)


def old() -> None:
    with faked(FakeFlashInfer(version="0.7.1")):
        assert "flashinfer-python 0.7.1 is too old" in plan(dist.new_group(), 1).reason


def test_unfused_with_an_old_flashinfer(ranks: Ranks) -> None:
    ranks.run(old)


def old_format() -> None:
    quantisation = Quantisation(FORMATS["mxfp8"], 32)
    message, flags = Message(4, 4096, torch.bfloat16, CPU), Flags(True, True, 16)
    with patch.object(machine, "capability", lambda device: (10, 0)):
        for version, strategy in (("0.7.2.post1", Strategy.UNFUSED), ("0.7.4", Strategy.ONE_SHOT)):
            with faked(FakeFlashInfer(version=version)):
                found, _ = dispatch.plan("op", 13, message, dist.new_group(), flags, quantisation=quantisation)
                assert found.strategy is strategy
                assert ("has no MXFP8" in found.reason) is (strategy is Strategy.UNFUSED)


def test_unfused_where_the_kernel_lacks_the_format(ranks: Ranks) -> None:
    ranks.run(old_format)
