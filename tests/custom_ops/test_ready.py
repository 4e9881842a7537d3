"""Calls of a kind that ran before: what makes a kind, what is looked at in every call, and what ends it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from custom_ops import counters, flashinfer_direct, ready, workspace
from custom_ops.counters import Launch
from custom_ops.flashinfer_adapter import KernelCall
from custom_ops.flashinfer_direct import INNER_PARAMETERS, Direct
from custom_ops.limits import Strategy
from custom_ops.ready import Ready, Tensors
from tests.support.fake_flashinfer import CPU, faked
from tests.support.ranks import Ranks

HIDDEN = 64
LAUNCH = Launch("op", "cuda", 1, Strategy.ONE_SHOT)


def tensors(rows: int = 4) -> Tensors:
    x, residual, norm, total = (torch.zeros(rows, HIDDEN).bfloat16() for _ in range(4))
    return Tensors(x, residual, torch.ones(HIDDEN).bfloat16(), norm_out=norm, residual_out=total)


class Inner:
    """In the place of FlashInfer's inner call: keeps what it was given, by name."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(dict(zip(INNER_PARAMETERS, args, strict=True)))


def made(given: Tensors, **changes: Any) -> tuple[Ready, Inner]:
    """A launcher for calls like the given one."""
    inner = Inner()
    handle = SimpleNamespace(world_size=2, rank=1, workspace_tensor="pointers")
    call = KernelCall(
        1, given.allreduce_in, one_shot=True, launch_with_pdl=True, completion_at_end=False, fp32_acc=True, weight_bias=1.0,
        **changes,
    )  # fmt: skip
    direct = Direct(inner, handle, call, residual=changes.get("residual"), gamma=changes.get("gamma"))
    return Ready(direct, counters.count_of(LAUNCH), given), inner


def test_launch_passes_everything_in_the_order_of_the_inner_call() -> None:
    given = tensors()
    launcher, inner = made(given)
    assert launcher.launch(given, 1e-5)
    (call,) = inner.calls
    assert call["allreduce_in"] is given.allreduce_in
    assert call["residual_in"] is given.residual
    assert call["rms_gamma"] is given.gamma
    assert call["norm_out"] is given.norm_out
    assert call["residual_out"] is given.residual_out
    assert (call["world_size"], call["world_rank"], call["workspace_ptrs"]) == (2, 1, "pointers")
    assert (call["token_num"], call["hidden_dim"], call["pattern_code"]) == (4, HIDDEN, 1)
    assert (call["launch_with_pdl"], call["use_oneshot"]) == (True, True)
    assert (call["trigger_completion_at_end"], call["fp32_acc"]) == (False, True)
    assert (call["rms_eps"], call["weight_bias"]) == (1e-5, 1.0)
    for name in ("allreduce_out", "quant_out", "scale_out", "scale_factor", "layout_code", "block_quant_group_size"):
        assert call[name] is None
    assert counters.launches() == {LAUNCH: 1}


def test_what_a_call_does_not_bring_is_that_of_the_first() -> None:
    given = tensors()._replace(residual=None, gamma=None)
    zeros, ones = torch.zeros(4, HIDDEN), torch.ones(HIDDEN)
    launcher, inner = made(given, residual=zeros, gamma=ones)
    assert launcher.launch(given, 1e-5)
    assert inner.calls[0]["residual_in"] is zeros
    assert inner.calls[0]["rms_gamma"] is ones


def shifted(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


ADDRESSES: dict[str, tuple[Any, bool]] = {
    "other tensors": (lambda given: tensors(), True),
    "a contribution that is not aligned": (
        lambda given: given._replace(allreduce_in=shifted(given.allreduce_in)),
        False,
    ),
    "an output that is not aligned": (lambda given: given._replace(norm_out=shifted(given.norm_out)), False),
    "the residual as output": (lambda given: given._replace(residual_out=given.residual), True),
    "the contribution as output": (lambda given: given._replace(norm_out=given.allreduce_in), True),
    "one tensor as both outputs": (lambda given: given._replace(norm_out=given.residual_out), False),
    "an output that begins within the residual": (lambda given: given._replace(**overlapping()), False),
}


def overlapping() -> dict[str, Tensor]:
    memory = torch.zeros(5, HIDDEN).bfloat16()
    return {"residual": memory[:4], "residual_out": memory[1:]}


@pytest.mark.parametrize("case", ADDRESSES)
def test_addresses_are_looked_at_in_every_call(case: str) -> None:
    change, launched = ADDRESSES[case]
    given = tensors()
    launcher, inner = made(given)
    assert launcher.launch(change(given), 1e-5) is launched
    assert len(inner.calls) == launched
    assert sum(counters.launches().values()) == launched, "what takes the long way is counted there"


def test_a_scale_need_not_be_aligned() -> None:
    given = tensors()._replace(scale_factor=torch.zeros(3)[1:2])
    launcher, _ = made(given)
    assert launcher.launch(given, 1e-5)


def test_kinds_differ_in_flags_shapes_strides_types_and_presence() -> None:
    given = tensors()
    kind = ready.key((1, True), given)
    assert kind == ready.key((1, True), tensors())
    others = [
        ready.key((1, False), given),
        ready.key((1, True), tensors(5)),
        ready.key((1, True), given._replace(residual=None)),
        ready.key((1, True), given._replace(gamma=given.gamma.float())),  # type: ignore[union-attr]
        ready.key((1, True), given._replace(allreduce_in=given.allreduce_in.t().contiguous().t())),
        ready.key((1, True), given._replace(allreduce_in=given.allreduce_in.view(2, 2, HIDDEN))),
    ]
    assert len({kind, *others}) == 7


def kept() -> None:
    with faked():
        import torch.distributed as dist

        on, given = dist.new_group(), tensors()
        kind = ready.key((1,), given)
        launcher, _ = made(given)
        ready.keep(on, kind, launcher)
        assert ready.find(on, kind) is None, "nothing is kept for a group that has not voted"
        workspace.state_of(on, CPU)
        ready.keep(on, kind, launcher)
        assert ready.find(on, kind) is launcher
        assert ready.find(on, ready.key((2,), given)) is None
        assert ready.find(dist.group.WORLD, kind) is None, "another group"  # type: ignore[arg-type]
        state = workspace.state_of(on, CPU)
        state.limit_to(state.limits)
        assert ready.find(on, kind) is None, "planned anew when limits change"
        ready.keep(on, kind, launcher)
        workspace.destroy(on.group_name)
        assert ready.find(on, kind) is None, "its workspace has gone"


def test_kinds_go_with_the_workspaces_of_their_group(ranks: Ranks) -> None:
    ranks.run(kept)


def test_many_kinds_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    state = workspace.GroupState(agreed=True)
    monkeypatch.setattr(workspace, "known_state", lambda group, backend=None: state)
    monkeypatch.setattr(ready, "_MOST_KINDS", 3)
    launcher, _ = made(tensors())
    for number in range(10):
        ready.keep(None, number, launcher)  # type: ignore[arg-type]
    assert len(state.ready) <= 3
    assert 9 in state.ready


def test_inner_call_of_another_release_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashinfer.comm import trtllm_ar

    call = KernelCall(1, torch.zeros(4, HIDDEN), True, True, False, True)
    handle = SimpleNamespace(world_size=2, rank=0, workspace_tensor=None)

    def release(parameters: tuple[str, ...]) -> SimpleNamespace:
        def fn(*args: Any) -> None: ...

        kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
        fn.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
        return SimpleNamespace(trtllm_allreduce_fusion=fn)

    for parameters, used in (
        (INNER_PARAMETERS, True),
        (INNER_PARAMETERS[:-1], False),
        ((*INNER_PARAMETERS, "new"), False),
    ):
        flashinfer_direct.inner.cache_clear()
        monkeypatch.setattr(trtllm_ar, "get_trtllm_comm_module", lambda parameters=parameters: release(parameters))
        assert (flashinfer_direct.direct(handle, call, True, True) is not None) is used
    flashinfer_direct.inner.cache_clear()


def test_parameters_are_those_of_the_installed_release() -> None:
    """Read from its source: its kernels need not be built."""
    from flashinfer.comm import trtllm_ar

    source = inspect.getsource(trtllm_ar.get_trtllm_comm_module.__wrapped__)
    signature = source[source.index("def trtllm_allreduce_fusion(") :]
    signature = signature[: signature.index(") -> None:")]
    names = [line.split(":")[0].strip() for line in signature.splitlines()[1:] if ":" in line]
    assert tuple(names) == INNER_PARAMETERS
