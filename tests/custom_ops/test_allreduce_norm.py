"""The fused op on CPU tensors: real sums between two gloo ranks, against float64 and against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
from tests.support.programs import tensors
from tests.support.ranks import Ranks

OP = torch.ops.custom_ops.call_trtllm_fused_allreduce_norm
HIDDEN = 64
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def call(x: Tensor, residual: Tensor | None, gamma: Tensor | None, **changes: object) -> tuple[Tensor, Tensor]:
    """The op with fresh outputs that are poisoned with NaN: (norm, residual)."""
    norm_out, residual_out = (torch.full_like(x, float("nan"), memory_format=torch.contiguous_format) for _ in range(2))
    outputs = {"norm_out": norm_out, "residual_out": residual_out}
    arguments = (x, residual, gamma, 1e-6, dist.get_world_size(), True, True, 0, 1)
    OP(*arguments, **{**outputs, **changes})
    return norm_out, residual_out


def eager(x: Tensor, residual: Tensor | None, gamma: Tensor | None, bias: float = 0.0) -> tuple[Tensor, Tensor]:
    """What the docstring of the op says it computes; the sum of two ranks has one rounding in any order."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    total = total if residual is None else total + residual
    x32 = total if x.dtype == torch.float64 else total.float()
    weight = 1.0 if gamma is None else bias + gamma.to(x32.dtype)
    return (x32 * torch.rsqrt(x32.square().mean(-1, True) + 1e-6) * weight).to(x.dtype), total


def check(x: Tensor, residual: Tensor | None, gamma: Tensor | None, bias: float = 0.0) -> None:
    norm, total = call(x, residual, gamma, weight_bias=bias)
    norm_expected, total_expected = eager(x, residual, gamma, bias)
    assert torch.equal(total, total_expected)
    torch.testing.assert_close(norm, norm_expected, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6)


def mine(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor that differs from rank to rank."""
    return tensors(*shape, dtype=dtype, count=1, seed=1000 + dist.get_rank())[0]


def shared(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    """A tensor that is the same on all ranks."""
    return tensors(*shape, dtype=dtype, count=1, seed=seed)[0]


def values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gamma = shared(HIDDEN, dtype=dtype)
    check(mine(*shape, dtype=dtype), shared(*shape, dtype=dtype), gamma)
    check(mine(*shape, dtype=dtype), None, gamma)
    check(mine(*shape, dtype=dtype), shared(*shape, dtype=dtype), None)
    check(mine(*shape, dtype=dtype), shared(*shape, dtype=dtype), gamma, bias=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(HIDDEN,), (5, HIDDEN), (2, 3, HIDDEN), (2, 1, 2, HIDDEN)], ids=str)
def test_values(ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ranks.run(values, shape, dtype)


def test_values_of_four_ranks_against_float64(four_ranks: Ranks) -> None:
    four_ranks.run(against_float64)


def against_float64() -> None:
    x, residual, gamma = mine(16, 2880), shared(16, 2880), shared(2880)
    norm, total = call(x, residual, gamma)
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    rounded = sum(part.double() for part in parts).to(torch.bfloat16)  # type: ignore[attr-defined]
    assert torch.equal(total, rounded + residual)
    exact = total.double() * torch.rsqrt(total.double().square().mean(-1, True) + 1e-6) * gamma.double()
    torch.testing.assert_close(norm.double(), exact, rtol=2**-8, atol=1e-6)


def test_leading_dimensions_may_differ(ranks: Ranks) -> None:
    ranks.run(different_shapes)


def different_shapes() -> None:
    x, residual, gamma = mine(6, HIDDEN), shared(2, 3, HIDDEN), shared(HIDDEN)
    norm, total = torch.empty(3, 2, HIDDEN).bfloat16(), torch.empty(2, 3, HIDDEN).bfloat16()
    call(x, residual, gamma, norm_out=norm, residual_out=total)
    norm_expected, total_expected = call(x, residual.view(6, HIDDEN), gamma)
    assert torch.equal(norm.view(6, HIDDEN), norm_expected)
    assert torch.equal(total.view(6, HIDDEN), total_expected)


def test_inputs_are_left_alone_and_copies_are_counted(ranks: Ranks) -> None:
    ranks.run(layouts)


def layouts() -> None:
    gamma = shared(HIDDEN)
    contiguous, residual = mine(4, 6, HIDDEN), shared(4, 6, HIDDEN)
    expected = call(contiguous, residual, gamma)
    assert not any(launch.copied_input for launch in custom_ops.launches())
    memory = torch.zeros(4 * 6 * HIDDEN + 1).bfloat16()
    for layout in ("transposed", "rows with gaps", "not aligned"):
        if layout == "transposed":
            x = contiguous.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "rows with gaps":
            x = torch.cat([contiguous, contiguous], -1)[..., :HIDDEN]
        else:
            x = memory[1:].view(4, 6, HIDDEN).copy_(contiguous)
        before = x.clone()
        custom_ops.reset_launches()
        got = call(x, residual, gamma)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), layout
        assert torch.equal(x, before)
        assert [launch.copied_input for launch in custom_ops.launches()] == [True], layout


def test_output_that_is_not_aligned(ranks: Ranks) -> None:
    ranks.run(unaligned_output)


def unaligned_output() -> None:
    x, residual, gamma = mine(4, HIDDEN), shared(4, HIDDEN), shared(HIDDEN)
    memory = torch.full((4 * HIDDEN + 2,), float("nan")).bfloat16()
    call(x, residual, gamma, norm_out=memory[1:-1].view(4, HIDDEN))
    assert torch.equal(memory[1:-1].view(4, HIDDEN), call(x, residual, gamma)[0])
    assert memory[[0, -1]].isnan().all()


def test_an_input_may_be_an_output(ranks: Ranks) -> None:
    ranks.run(in_place)


def in_place() -> None:
    x, residual, gamma = mine(4, HIDDEN), shared(4, HIDDEN), shared(HIDDEN)
    norm, total = call(x, residual, gamma)
    a, b = x.clone(), residual.clone()
    OP(a, b, gamma, 1e-6, 2, True, True, 0, 1, a, residual_out=b)
    assert torch.equal(a, norm)
    assert torch.equal(b, total)
    a, b = x.clone(), residual.clone()
    OP(a, b, gamma, 1e-6, 2, True, True, 0, 1, b, residual_out=a)
    assert torch.equal(b, norm)
    assert torch.equal(a, total)


def test_no_tokens(ranks: Ranks) -> None:
    ranks.run(no_tokens)


def no_tokens() -> None:
    for shape in [(0, HIDDEN), (2, 0, HIDDEN)]:
        norm, total = call(mine(*shape), shared(*shape), shared(HIDDEN))
        assert norm.shape == total.shape == shape
    assert not custom_ops.launches(), "nothing ran"


def test_pattern_0_with_and_without_residual(ranks: Ranks) -> None:
    ranks.run(pattern_0)


def pattern_0() -> None:
    x, residual = mine(2, 3, HIDDEN), shared(2, 3, HIDDEN)
    for other in (residual, None):
        out = torch.full_like(x, float("nan"))
        OP(x, other, None, 0.0, 2, True, True, 0, 0, residual_out=out)
        assert torch.equal(out, eager(x, other, None)[1])


def test_epsilon_as_a_tensor(ranks: Ranks) -> None:
    ranks.run(epsilon_tensor)


def epsilon_tensor() -> None:
    x, residual, gamma = mine(4, HIDDEN), shared(4, HIDDEN), shared(HIDDEN)
    expected = call(x, residual, gamma)[0]
    for eps in (torch.tensor(1e-6), torch.tensor(1e-6, dtype=torch.float64), torch.tensor([1e-6])):
        assert torch.equal(call(x, residual, gamma, rms_eps_tensor=eps)[0], expected)
    assert not torch.equal(call(x, residual, gamma, rms_eps_tensor=torch.tensor(10.0))[0], expected)


def test_special_values_stay_in_their_row(ranks: Ranks) -> None:
    ranks.run(special_values)


def special_values() -> None:
    x, residual, gamma = mine(6, HIDDEN), shared(6, HIDDEN), shared(HIDDEN)
    clean = call(x, residual, gamma)
    x[0, 3], x[1, 5], x[2], residual[3, 0] = float("nan"), float("inf"), 0.0, 1e5
    residual[2] = 0.0
    norm, total = call(x, residual, gamma)
    assert norm[0].isnan().all()
    assert norm[1].isnan().any()
    assert (norm[2] == 0).all()
    assert norm[3].isfinite().all()
    for row in (4, 5):
        assert torch.equal(norm[row], clean[0][row])
        assert torch.equal(total[row], clean[1][row])


def test_accumulation_type(four_ranks: Ranks) -> None:
    four_ranks.run(accumulation)


def accumulation() -> None:
    x = torch.full((1, HIDDEN), 256.0 if dist.get_rank() == 0 else 1.0).bfloat16()
    rounded_once, rounded_often = torch.empty_like(x), torch.empty_like(x)
    OP(x, None, None, 0.0, 4, True, True, 0, 0, residual_out=rounded_once)
    OP(x, None, None, 0.0, 4, True, False, 0, 0, residual_out=rounded_often)
    assert rounded_once[0, 0] == 260
    assert rounded_often[0, 0] == 256


def test_sub_groups_of_four_ranks(four_ranks: Ranks) -> None:
    four_ranks.run(sub_groups)


def sub_groups() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()
    x, residual, gamma = mine(4, HIDDEN), shared(4, HIDDEN), shared(HIDDEN)
    norm, total = torch.empty_like(x), torch.empty_like(x)
    OP(x, residual, gamma, 1e-6, 2, True, True, 0, 1, norm, residual_out=total, group_name=group.group_name)
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    assert torch.equal(total, expected + residual)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("pattern_code", [0, 1])
def test_opcheck(pattern_code: int, with_residual: bool) -> None:
    x, residual, norm_out, residual_out = tensors(2, 3, HIDDEN, count=4)
    gamma = tensors(HIDDEN, count=1)[0] if pattern_code else None
    arguments = (x, residual if with_residual else None, gamma, 1e-6, 2, True, True, 0, pattern_code)
    outputs = {"norm_out": norm_out if pattern_code else None, "residual_out": residual_out}
    torch.library.opcheck(OP.default, arguments, outputs)


def test_schema_begins_with_the_parameters_that_engines_pass() -> None:
    names = [argument.name for argument in OP.default._schema.arguments]
    assert names[:13] == [
        "allreduce_in", "residual", "rms_gamma", "rms_eps", "world_size", "launch_with_pdl", "fp32_acc",
        "max_token_num", "pattern_code", "norm_out", "quant_out", "scale_out", "scale_factor",
    ]  # fmt: skip
    written = {a.name for a in OP.default._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == {"norm_out", "quant_out", "scale_out", "residual_out"}
    assert torch.Tag.needs_exact_strides in OP.default.tags
    assert all(argument.kwarg_only and argument.has_default_value() for argument in OP.default._schema.arguments[13:])
