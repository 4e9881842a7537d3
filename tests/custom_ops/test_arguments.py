"""Bad input to the fused op: a ValueError that names the argument, before anything is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from custom_ops import call_trtllm_fused_allreduce_norm
from tests.support.programs import tensors

pytestmark = pytest.mark.usefixtures("fake_group")
HIDDEN = 64


def good() -> dict[str, Any]:
    """Arguments that pass every check."""
    x, residual, norm_out, residual_out = tensors(2, 3, HIDDEN, count=4)
    return {
        "allreduce_in": x, "residual": residual, "rms_gamma": tensors(HIDDEN, count=1)[0], "rms_eps": 1e-6,
        "world_size": 2, "launch_with_pdl": True, "fp32_acc": True, "max_token_num": 0, "pattern_code": 1,
        "norm_out": norm_out, "residual_out": residual_out,
    }  # fmt: skip


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "gamma of another type": ({"rms_gamma": torch.zeros(HIDDEN)}, "rms_gamma: dtype torch.float32"),
    "gamma of another size": ({"rms_gamma": bf16(HIDDEN + 1)}, r"rms_gamma: shape \[65\]"),
    "gamma of two dimensions": ({"rms_gamma": bf16(1, HIDDEN)}, r"rms_gamma: shape \[1, 64\]"),
    "residual of another type": ({"residual": torch.zeros(2, 3, HIDDEN)}, "residual: dtype torch.float32"),
    "residual of another hidden size": ({"residual": bf16(2, 6, HIDDEN // 2)}, r"residual: shape \[2, 6, 32\]"),
    "residual with too few rows": ({"residual": bf16(1, 3, HIDDEN)}, r"residual: shape \[1, 3, 64\]"),
    "norm output of another shape": ({"norm_out": bf16(2, 4, HIDDEN)}, r"norm_out: shape \[2, 4, 64\]"),
    "norm output of another type": ({"norm_out": torch.zeros(2, 3, HIDDEN)}, "norm_out: dtype torch.float32"),
    "residual output of another shape": ({"residual_out": bf16(2, 3, 32)}, r"residual_out: shape \[2, 3, 32\]"),
    "norm output with gaps between rows": (
        {"norm_out": bf16(2, 3, 2 * HIDDEN)[..., :HIDDEN]}, r"norm_out: shape \[2, 3, 64\] with strides \[384, 128, 1\]",
    ),
    "norm output transposed": (
        {"norm_out": bf16(3, 2, HIDDEN).transpose(0, 1)}, r"norm_out: shape .* no contiguous view as \[tokens, 64\]",
    ),
    "no norm output": ({"norm_out": None}, "norm_out=None: pattern 1"),
    "no residual output": ({"residual_out": None}, "residual_out=None: pattern 1"),
    "output that the pattern does not write": ({"quant_out": bf16(2, 3, HIDDEN)}, "quant_out: pattern 1 .* does not write"),
    "scale that the pattern does not take": ({"scale_factor": torch.ones(1)}, "scale_factor: pattern 1 .* takes none"),
    "norm output in pattern 0": ({"pattern_code": 0, "rms_gamma": None}, "norm_out: pattern 0 .* does not write"),
    "unknown pattern": ({"pattern_code": 7}, r"pattern_code=7: .* 0 \(all-reduce\), 1"),
    "unknown group": ({"group_name": "nobody"}, "group_name='nobody': no such process group"),
    "group of another size": ({"world_size": 3}, "world_size=3: group .* has 2 ranks"),
    "epsilon not a number": ({"rms_eps": float("nan")}, "rms_eps=nan: must be finite"),
    "epsilon infinite": ({"rms_eps": float("inf")}, "rms_eps=inf: must be finite"),
    "epsilon tensor infinite": ({"rms_eps_tensor": torch.tensor(float("inf"))}, "rms_eps=inf: must be finite"),
    "epsilon tensor of two elements": ({"rms_eps_tensor": torch.zeros(2)}, r"rms_eps_tensor: shape \[2\]"),
    "weight bias not finite": ({"weight_bias": float("inf")}, "weight_bias=inf: must be finite"),
    "input of rank 0": ({"allreduce_in": torch.zeros((), dtype=torch.bfloat16)}, "allreduce_in: rank 0"),
    "input without columns": ({"allreduce_in": bf16(2, 0)}, r"allreduce_in: shape \[2, 0\]"),
    "input of a type that is not served": ({"allreduce_in": torch.zeros(2, 3, HIDDEN).int()}, "allreduce_in: dtype torch.int32"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_nothing_is_written(case: str) -> None:
    changes, message = BAD[case]
    arguments = good()
    kept = {name: tensor.clone() for name, tensor in arguments.items() if isinstance(tensor, torch.Tensor)}
    with pytest.raises(ValueError, match=message):
        call_trtllm_fused_allreduce_norm(**{**arguments, **changes})
    for name, tensor in kept.items():
        assert torch.equal(arguments[name], tensor), name


def test_without_a_process_group() -> None:
    torch.distributed.destroy_process_group()
    try:
        with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
            call_trtllm_fused_allreduce_norm(**good())
    finally:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


@pytest.mark.parametrize("first", ["allreduce_in", "residual", "norm_out"])
def test_outputs_that_overlap_in_part(first: str) -> None:
    arguments = good()
    memory = torch.zeros(7 * HIDDEN, dtype=torch.bfloat16)
    arguments[first] = memory[: 6 * HIDDEN].view(2, 3, HIDDEN)
    arguments["residual_out"] = memory[HIDDEN:].view(2, 3, HIDDEN)
    with pytest.raises(ValueError, match=f"residual_out overlaps {first}"):
        call_trtllm_fused_allreduce_norm(**arguments)


def test_two_outputs_may_not_be_one() -> None:
    arguments = good()
    arguments["norm_out"] = arguments["residual_out"]
    with pytest.raises(ValueError, match="residual_out overlaps norm_out"):
        call_trtllm_fused_allreduce_norm(**arguments)


def test_op_checks_in_the_dispatcher_too() -> None:
    arguments = good()
    arguments["rms_eps"] = float("nan")
    with pytest.raises(ValueError, match="rms_eps=nan"):
        torch.ops.custom_ops.call_trtllm_fused_allreduce_norm(**arguments)
