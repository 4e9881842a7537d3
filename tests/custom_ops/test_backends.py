"""FlashInfer's multi-node backend, with FlashInfer faked: it was not run on hardware."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import flashinfer.comm as flashinfer_comm
import pytest
import torch
import torch.distributed as dist

from custom_ops import backends, dispatch, formats, workspace
from custom_ops import flashinfer_adapter as adapter
from custom_ops.counters import Launch
from custom_ops.dispatch import Flags, Message
from custom_ops.group_state import Workspace
from custom_ops.limits import Strategy
from custom_ops.pattern_codes import PATTERNS
from tests.support.fake_flashinfer import CPU, FakeFlashInfer, faked
from tests.support.ranks import Ranks

BF16 = torch.bfloat16
MNNVL = backends.find("mnnvl")


def plan(on: Any, tokens: int, code: int = 1, backend: str | None = "mnnvl", **flags: Any) -> Launch:
    asked = Flags(True, True, 16, backend=backends.find(backend), **flags)
    return dispatch.plan("op", code, Message(tokens, 4096, BF16, CPU), on, asked)[0]


def planned() -> None:
    with faked() as fake:
        on = dist.new_group()
        for tokens in (1, 16, 4096):
            launch = plan(on, tokens)
            assert launch.strategy is Strategy.BACKEND, "it chooses itself"
            assert launch.one_shot is None
            assert launch.completion_at_end is True, "it ignores the trigger"
            assert launch.launch_with_pdl is True
        assert plan(on, 4097).reason == "message above the limit of this device and world size"
        assert plan(on, 1, one_shot_only=True).one_shot is True
        assert plan(on, 1, code=8).reason == "FlashInfer's backend 'mnnvl' has no pattern 8"
        assert plan(on, 1, code=8, backend=None).strategy is Strategy.ONE_SHOT
        made = [detail for name, detail in fake.events if name == "create"]
        assert len(made) == 3, "of each backend its own, and a larger one of this"


def test_plan(ranks: Ranks) -> None:
    ranks.run(planned)


def spans_hosts() -> list[str | None]:
    with faked(FakeFlashInfer(facts={"device": "NVIDIA H200", "host": f"host{dist.get_rank()}"})):
        on = dist.new_group()
        problems = [workspace.state_of(on, CPU, name).problem for name in ("mnnvl", "trtllm")]
        made = workspace.acquire(on, BF16, CPU, 1, "mnnvl")
        assert isinstance(made, Workspace)
        assert made.handle.startswith("mnnvl/")
        assert workspace.known_state(on, "mnnvl") is not workspace.known_state(on)
        return problems


def test_group_over_several_hosts_fuses_with_it_and_not_without(ranks: Ranks) -> None:
    for mnnvl, trtllm in ranks.run(spans_hosts):
        assert mnnvl is None
        assert trtllm is not None
        assert "host differs: 'host0' on rank 0, 'host1' on rank 1" in trtllm


def fails() -> str:
    on_rank_1 = {"create": "multicast is not supported"} if dist.get_rank() else {}
    with faked(FakeFlashInfer(fails=on_rank_1)) as fake:
        on = dist.new_group()
        reason = plan(on, 1).reason
        assert plan(on, 4096).reason == reason, "remembered"
        assert fake.names.count("create") == 1
        assert fake.names.count("release") == (0 if dist.get_rank() else 1), "what was made is freed again"
        return reason


def test_where_it_cannot_be_made_all_ranks_go_unfused(ranks: Ranks) -> None:
    first, second = ranks.run(fails)
    assert first == second == "rank 1 of the group: RuntimeError: multicast is not supported"


def test_workspace_talks_over_exactly_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer.comm import comm_backend

    signature = inspect.signature(flashinfer_comm.create_allreduce_fusion_workspace)
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        flashinfer_comm,
        "create_allreduce_fusion_workspace",
        lambda **kwargs: seen.append(signature.bind(**kwargs).arguments),
    )
    monkeypatch.setattr(comm_backend, "TorchDistBackend", lambda group: ("over", group))
    group: Any = SimpleNamespace(size=lambda: 4, rank=lambda: 3)
    adapter.create(group, BF16, 8 << 20, "mnnvl")
    (made,) = seen
    assert (made["backend"], made["comm_backend"], made["group"]) == ("mnnvl", ("over", group), group)
    assert made["force_oneshot_support"] is True


def test_release_does_not_touch_what_only_the_other_backend_has() -> None:
    freed: list[str] = []
    adapter.release(SimpleNamespace(destroy=lambda: freed.append("destroyed")), "mnnvl")
    assert freed == ["destroyed"]


def test_every_pattern_of_the_op_is_served_by_the_default_backend() -> None:
    assert backends.find(None).patterns == set(PATTERNS)
    assert MNNVL.patterns < set(PATTERNS)


def test_patterns_are_those_that_the_installed_release_accepts() -> None:
    """Its branch for the backend lists them by name."""
    source = inspect.getsource(flashinfer_comm.allreduce_fusion)
    branch = source[source.index("elif isinstance(workspace, MNNVLAllReduceFusionWorkspace)") :]
    codes = {
        value for name, value in vars(flashinfer_comm.AllReduceFusionPattern).items()
        if isinstance(value, int) and f"AllReduceFusionPattern.{name}" in branch
    }  # fmt: skip
    lacks = {
        code for code in MNNVL.patterns
        if (format := PATTERNS[code].format) and adapter.format_refusal(formats.FORMATS[format])
    }  # fmt: skip
    assert codes == MNNVL.patterns - lacks


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend='nccl': must be one of 'trtllm', 'mnnvl'"):
        backends.find("nccl")


def test_group_scales_are_the_format_that_it_lacks() -> None:
    from custom_ops import pattern_codes

    lacking = {name for name in formats.FORMATS if pattern_codes.find(name, norm_out=False).code not in MNNVL.patterns}
    assert lacking == {"fp8_group"}
