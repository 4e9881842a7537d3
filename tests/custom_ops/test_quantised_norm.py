"""The quantising patterns of the fused op on CPU tensors: real sums between two ranks, and nothing written beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
from custom_ops import formats, pattern_codes, reference_quant
from tests.support.programs import tensors
from tests.support.quantised import CASES, Outputs, quantisation_of, raw
from tests.support.ranks import Ranks

OP = torch.ops.custom_ops.call_trtllm_fused_allreduce_norm
SCALE = 0.037


def call(
    case: str, x: Tensor, residual: Tensor | None, gamma: Tensor, norm_out: bool
) -> tuple[Tensor, Tensor, Outputs]:
    """(new residual, norm, values and scales) that the op writes."""
    quantisation, outputs = quantisation_of(case), Outputs(case, tuple(x.shape))
    total, norm = (torch.full_like(x, float("nan")) for _ in range(2))
    OP(
        x, residual, gamma, 1e-6, dist.get_world_size(), True, True, 0,
        pattern_codes.find(quantisation.format.name, norm_out).code,
        scale_factor=torch.tensor([SCALE]) if quantisation.format.takes_scale else None,
        norm_out=norm if norm_out else None, residual_out=total, **outputs.tensors, **CASES[case],
    )  # fmt: skip
    return total, norm, outputs


def compare(case: str, shape: tuple[int, ...], dtype: torch.dtype, with_residual: bool) -> None:
    (x,) = tensors(*shape, dtype=dtype, count=1, seed=100 + dist.get_rank())
    residual = tensors(*shape, dtype=dtype, count=1, seed=1)[0] if with_residual else None
    (gamma,) = tensors(shape[-1], dtype=dtype, count=1, seed=2)
    expected = x.clone()
    dist.all_reduce(expected)
    expected = expected if residual is None else expected + residual
    total, norm, with_norm = call(case, x, residual, gamma, norm_out=True)
    total_only, _, without_norm = call(case, x, residual, gamma, norm_out=False)
    assert torch.equal(total, expected)
    assert torch.equal(total_only, expected)
    scale = torch.tensor(SCALE)
    values, scales = reference_quant.quantise(norm.view(-1, shape[-1]), quantisation_of(case), scale)
    for outputs in (with_norm, without_norm):
        outputs.check(values, scales)


SIZES = [((tokens, 384), torch.bfloat16) for tokens in (1, 5, 32, 127, 128, 129)]
HIDDEN = [((5, hidden), torch.bfloat16) for hidden in (1792, 2880, 3584, 5376, 7168)]
OTHERS = [((2, 3, 384), torch.float16), ((384,), torch.bfloat16), ((2, 1, 2, 384), torch.float32)]


@pytest.mark.parametrize(("shape", "dtype"), [*SIZES, *HIDDEN, *OTHERS], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_scales(ranks: Ranks, case: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    quantisation = quantisation_of(case)
    if formats.refusal(quantisation, shape[-1], dtype):
        ranks.run(refused, case, shape, dtype)
        return
    for with_residual in (True, False):
        ranks.run(compare, case, shape, dtype, with_residual)


def refused(case: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A clear error where the format does not fit, and nothing is written."""
    (x,) = tensors(*shape, dtype=dtype, count=1)
    (gamma,) = tensors(shape[-1], dtype=dtype, count=1)
    with pytest.raises(ValueError, match=r"elements share a scale|is made of"):
        call(case, x, None, gamma, norm_out=False)


def no_rows(case: str) -> None:
    call(case, torch.empty(0, 384).bfloat16(), None, torch.ones(384).bfloat16(), norm_out=False)


@pytest.mark.parametrize("case", CASES)
def test_no_rows(ranks: Ranks, case: str) -> None:
    ranks.run(no_rows, case)


def good(format: str = "fp8_token") -> dict[str, Any]:
    """Arguments of a quantising call that pass every check."""
    x, residual, total = tensors(2, 3, 64, count=3)
    quantisation = formats.choose(format, group_size=32 if format == "fp8_group" else None)
    buffer = quantisation.scales(6, 64)
    return {
        "allreduce_in": x, "residual": residual, "rms_gamma": None, "rms_eps": 1e-6, "world_size": 2,
        "launch_with_pdl": True, "fp32_acc": True, "max_token_num": 0,
        "pattern_code": pattern_codes.find(format, False).code, "residual_out": total,
        "quant_out": torch.empty(2, 3, 64 // quantisation.format.values, dtype=quantisation.format.dtype),
        "scale_out": None if buffer is None else buffer.empty(torch.device("cpu")),
        "scale_factor": torch.ones(1) if quantisation.format.takes_scale else None,
        "block_quant_group_size": 32 if format == "fp8_group" else None,
    }  # fmt: skip


F8 = torch.float8_e4m3fn
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no values": ("fp8", {"quant_out": None}, r"quant_out=None: pattern 2 .* writes it"),
    "no scale": ("fp8", {"scale_factor": None}, r"scale_factor=None: pattern 2 .* needs it"),
    "no scale output": ("fp8_token", {"scale_out": None}, r"scale_out=None: pattern 10 .* writes it"),
    "scale output of static FP8": ("fp8", {"scale_out": torch.empty(6, 1)}, "scale_out: pattern 2 .* does not write"),
    "scale of dynamic FP8": ("fp8_token", {"scale_factor": torch.ones(1)}, "scale_factor: pattern 10 .* takes none"),
    "scale of two": ("fp8", {"scale_factor": torch.ones(2)}, r"scale_factor: shape \[2\].* must be one torch.float32"),
    "scale in bfloat16": ("fp8", {"scale_factor": torch.ones(1).bfloat16()}, "scale_factor: .*bfloat16"),
    "values of another type": (
        "fp8", {"quant_out": torch.empty(2, 3, 64, dtype=torch.uint8)}, r"quant_out: .* static FP8 needs .*float8_e4m3fn",
    ),
    "values of another width": ("nvfp4", {"quant_out": torch.empty(2, 3, 64, dtype=torch.uint8)}, r"needs .*\[2, 3, 32\]"),
    "too few values": ("fp8", {"quant_out": torch.empty(3, 64, dtype=F8)}, r"quant_out: shape \[3, 64\]"),
    "values with gaps": ("fp8", {"quant_out": torch.empty(2, 3, 128, dtype=F8)[..., :64]}, "quant_out: .* contiguous"),
    "scales of another type": ("fp8_token", {"scale_out": torch.empty(6, 1).bfloat16()}, "scale_out: .* per-token FP8"),
    "too few scales": ("fp8_token", {"scale_out": torch.empty(5, 1)}, r"scale_out: shape \[5, 1\]"),
    "scales without padding": (
        "mxfp8", {"scale_out": torch.empty(6, 2, dtype=torch.uint8)}, r"scale_out: .* MXFP8 needs \[128, 4\]",
    ),
    "scales row by row": (
        "fp8_group", {"scale_out": torch.empty(6, 1, dtype=torch.int32).expand(6, 1).repeat(1, 2)[:, :2]},
        r"scale_out: shape \[6, 2\] .* needs \[6, 1\] with strides \[1, 8\]",
    ),
    "layout that the kernel does not write": ("nvfp4", {"layout_code": 1}, r"layout_code=1: NVFP4 scales .* 0 .* 2"),
    "layout of a format without": ("fp8_group", {"layout_code": 0}, "layout_code=0: per-group FP8"),
    "layout of no format": ("none", {"layout_code": 0}, "layout_code=0: pattern 1 .* takes none"),
    "group of no format": ("none", {"block_quant_group_size": 32}, "block_quant_group_size=32: pattern 1"),
    "no group": ("fp8_group", {"block_quant_group_size": None}, "block_quant_group_size=None: .* positive"),
    "group that does not divide": ("fp8_group", {"block_quant_group_size": 48}, "hidden size 64: .* 48 elements"),
}  # fmt: skip


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_and_nothing_is_written(case: str) -> None:
    format, changes, message = BAD[case]
    arguments = (
        {**good(), "pattern_code": 1, "quant_out": None, "scale_out": None} if format == "none" else good(format)
    )
    if format == "none":
        arguments["norm_out"] = torch.zeros(2, 3, 64).bfloat16()
    arguments.update(changes)
    before = {name: raw(value).clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    with pytest.raises(ValueError, match=message):
        OP(**arguments)
    for name, value in before.items():
        assert torch.equal(raw(arguments[name]), value) or value.dtype.is_floating_point, f"{name} is as it was"


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("format", custom_ops.FORMATS)
def test_opcheck(format: str) -> None:
    arguments = good(format)
    # torch compares no float8, so its check of the schema is made here: nothing but outputs is written.
    torch.library.opcheck(OP.default, (), arguments, test_utils=["test_faketensor"])
    inputs = {name: arguments[name] for name in ("allreduce_in", "residual", "scale_factor")}
    before = {name: value.clone() for name, value in inputs.items() if value is not None}
    OP(**arguments)
    assert all(torch.equal(inputs[name], value) for name, value in before.items())


@pytest.mark.usefixtures("fake_group")
def test_values_may_not_lie_over_an_input() -> None:
    arguments = good("fp8")
    memory = arguments["allreduce_in"].view(torch.uint8).view(-1)
    with pytest.raises(ValueError, match="quant_out overlaps allreduce_in"):
        OP(**{**arguments, "quant_out": memory[:384].view(F8).view(2, 3, 64)})
