"""The debug switch: ranks that are about to do different things all raise, before anything runs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
import fusion_passes
from custom_ops import rank_check
from fusion_passes import FusionConfig, compat
from tests.support.programs import HIDDEN, NORMS, AddNorm, tensors
from tests.support.ranks import Ranks

OP = torch.ops.custom_ops.call_trtllm_fused_allreduce_norm
SHORT = timedelta(seconds=2)


def call(
    tokens: int = 4, hidden: int = 64, dtype: torch.dtype = torch.bfloat16, eps: float = 1e-6, **flags: Any
) -> Tensor:
    x, residual = (torch.ones(tokens, hidden, dtype=dtype) for _ in range(2))
    norm_out, residual_out = torch.full_like(x, 7), torch.full_like(x, 7)
    threshold = flags.pop("pdl_advance_launch_tokens", None)
    arguments = (x, residual, None, eps, dist.get_world_size(), True, True, 0, 1, norm_out)
    OP(*arguments, residual_out=residual_out, check_ranks=True, pdl_advance_launch_tokens=threshold, **flags)
    return residual_out


def outcome(*changes: dict[str, Any]) -> str:
    try:
        total = call(**changes[dist.get_rank()])
    except RuntimeError as error:
        return str(error)
    return f"sum {total.max().item() if total.numel() else 0}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 5}, "allreduce_in differs: [[4, 64], 'torch.bfloat16', 'cpu'] on rank 0, [[5, 64]"),
        ({"tokens": 0}, "allreduce_in differs: [[4, 64], 'torch.bfloat16', 'cpu'] on rank 0, [[0, 64]"),
        ({"hidden": 128}, "[[4, 128], 'torch.bfloat16', 'cpu'] on rank 1"),
        ({"dtype": torch.float16}, "[[4, 64], 'torch.float16', 'cpu'] on rank 1"),
        ({"pdl_advance_launch_tokens": 3}, "flags differs: "),
        ({"eps": 1e-5}, "flags differs: "),
    ],
    ids=["tokens", "no tokens", "hidden", "dtype", "trigger", "epsilon"],
)
def test_ranks_that_differ_all_raise(ranks: Ranks, changes: dict[str, Any], message: str) -> None:
    first, second = ranks.run(outcome, {}, changes)
    assert first == second
    assert message in first
    assert first.startswith("check_ranks: call ")


def test_ranks_that_agree_compute(ranks: Ranks) -> None:
    for _ in range(3):
        assert ranks.run(outcome, {}, {}) == ["sum 3.0", "sum 3.0"]
    assert ranks.run(outcome, {"tokens": 0}, {"tokens": 0}) == ["sum 0", "sum 0"]


def test_four_ranks(four_ranks: Ranks) -> None:
    assert four_ranks.run(outcome, {}, {}, {}, {}) == ["sum 5.0"] * 4
    found = four_ranks.run(outcome, {}, {}, {}, {"tokens": 9})
    assert len(set(found)) == 1
    assert "on rank 3 of the group" in found[0]


def other_op() -> str:
    try:
        if dist.get_rank():
            custom_ops.flashinfer_all_reduce(torch.ones(4, 64), check_ranks=True)
        else:
            call()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_call_different_ops(ranks: Ranks) -> None:
    first, second = ranks.run(other_op)
    assert first == second
    assert "op differs: 'call_trtllm_fused_allreduce_norm' on rank 0, 'flashinfer_all_reduce' on rank 1" in first


def absent() -> str:
    group = dist.new_group([0, 1])
    with patch.object(rank_check, "TIMEOUT", SHORT):
        if dist.get_rank():
            return ""
        with pytest.raises(RuntimeError, match=r"rank \[1\] of the group did not vote within 0:00:02") as found:
            custom_ops.flashinfer_all_reduce(torch.ones(4, 64), group.group_name, check_ranks=True)
        return str(found.value)


def test_a_rank_that_does_not_come_is_waited_for_so_long(ranks: Ranks) -> None:
    assert ranks.run(absent, timeout=30)[0]


def compiled(path: Any, tokens: int) -> str:
    config = FusionConfig(check_ranks=True, norm_path=path)
    torch._dynamo.reset()
    inputs = tensors(tokens + dist.get_rank() * (tokens > 4), HIDDEN)
    with torch.no_grad(), compat.without_caches():
        fn = torch.compile(AddNorm(NORMS["meta"]()), fullgraph=True, options=fusion_passes.options(config))
        try:
            fn(*inputs)
        except RuntimeError as error:
            return str(error)
    return "computed"


@pytest.mark.parametrize("path", ["fused", "overlap"])
def test_in_a_compiled_model(ranks: Ranks, path: str) -> None:
    assert ranks.run(compiled, path, 4) == ["computed"] * 2
    first, second = ranks.run(compiled, path, 5)
    assert first == second
    assert f"[[5, {HIDDEN}]" in first
    assert f"[[6, {HIDDEN}]" in first


def left_behind() -> int:
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(20):
        call()
    dist.barrier()
    return int(store.num_keys() - before)


def test_the_store_does_not_fill_up(ranks: Ranks) -> None:
    assert ranks.run(left_behind) == [0, 0]
