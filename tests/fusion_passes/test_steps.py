"""Biases, multipliers and further tensors between a sum and its norm: what is folded where, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor

from fusion_passes import FusionConfig
from tests.support.capture import Captured, capture
from tests.support.programs import EPS, HIDDEN, reduce, tensors
from tests.support.ranks import Ranks
from tests.support.ulp import ulp

Program = Callable[..., Tensor]

MATRIX = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(3)) / HIDDEN**0.5
BIAS = torch.linspace(-1, 1, HIDDEN).bfloat16()


def norm(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (HIDDEN,), eps=EPS)


def bias(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = r + (reduce(x) + BIAS)
    return norm(total), total


def bias_alone(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = reduce(x) + BIAS
    return norm(total), total


def multiplier(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = r + reduce(x) * 0.22
    return norm(total), total


def divisor(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = r + reduce(x) / 3
    return norm(total), total


def multiplier_of_one(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = r + reduce(x) * 1.0
    return norm(total), total


def multiplier_alone(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = reduce(x) * torch.tensor(8.0, dtype=x.dtype)
    return norm(total), total


def bias_and_multiplier(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = r + 0.22 * (reduce(x) + BIAS)
    return norm(total), total


def second_tensor(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = r + (reduce(x) + r.sin())
    return norm(total), total


def second_sum(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = r + (reduce(x) + reduce(x.sin()))
    return norm(total), total


def broadcast_residual(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = r[:1] + reduce(x)
    return norm(total), total


def added_in_float32(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = (r.float() + reduce(x).float()).to(x.dtype)
    return norm(total), total


def product(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Inductor makes an addmm of the sum and the product."""
    total = r.flatten(0, 1) + (reduce(x.flatten(0, 1)) + r.flatten(0, 1).sin() @ MATRIX.to(x.dtype))
    return norm(total).view_as(x), total.view_as(x)


@dataclass(frozen=True)
class Expected:
    """Verdicts with reassociation, and without."""

    on: list[str]
    off: list[str]


FOLDED = {
    bias: Expected(["folded_add_norm"], ["bias_between"]),
    multiplier: Expected(["folded_add_norm"], ["scale_between"]),
    divisor: Expected(["folded_add_norm"], ["scale_between"]),
    multiplier_alone: Expected(["folded_norm"], ["scale_between"]),
    bias_and_multiplier: Expected(["folded_add_norm"], ["scale_between"]),
    second_tensor: Expected(["folded_add_norm"], ["sum_of_sums"]),
    product: Expected(["folded_add_norm"], ["sum_of_sums"]),
    second_sum: Expected(["norm_shared", "folded_add_norm"], ["sum_of_sums", "sum_of_sums"]),
}
"""What is taken before the sum instead of after it: another order of roundings, so only if allowed."""

EXACT = {
    bias_alone: ["add_norm"],
    multiplier_of_one: ["add_norm"],
    broadcast_residual: ["add_norm"],
    added_in_float32: ["add_norm"],
}
"""What the op rounds where eager mode does."""


def run(program: Program, config: FusionConfig | None = None) -> Captured:
    return capture(program, *tensors(2, 8, HIDDEN), config=config)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("program", FOLDED, ids=lambda program: program.__name__)
def test_folded(program: Program) -> None:
    assert run(program).rules == FOLDED[program].on


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    "config",
    [FusionConfig(reassociate=False), FusionConfig(exact_rounding=True)],
    ids=["reassociate", "exact_rounding"],
)
@pytest.mark.parametrize("program", FOLDED, ids=lambda program: program.__name__)
def test_left_alone_where_the_order_is_to_be_kept(program: Program, config: FusionConfig) -> None:
    captured = run(program, config)
    assert captured.rules == FOLDED[program].off
    assert captured.after == captured.before


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("program", EXACT, ids=lambda program: program.__name__)
def test_exact_steps_fuse_whatever_the_configuration(program: Program) -> None:
    assert run(program).rules == EXACT[program]
    assert run(program, FusionConfig(exact_rounding=True)).rules == EXACT[program]


@pytest.mark.usefixtures("fake_group")
def test_graph_of_a_bias() -> None:
    assert_expected_inline(
        run(bias).before[0],
        """\
arg0_1: bf16[2, 8, 64]
arg1_1: bf16[64]
arg2_1: bf16[2, 8, 64]
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(wait_tensor, arg1_1)
add_1: bf16[2, 8, 64] = add.Tensor(arg2_1, add)
convert_element_type: f32[2, 8, 64] = convert_element_type(add_1, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [2], True)
add_2: f32[2, 8, 1] = add.Scalar(mean, 9.999999747378752e-06)
rsqrt: f32[2, 8, 1] = rsqrt(add_2)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
return [convert_element_type_1, add_1]""",
    )
    assert_expected_inline(
        run(bias).after[0],
        """\
arg0_1: bf16[2, 8, 64]
arg1_1: bf16[64]
arg2_1: bf16[2, 8, 64]
add_tensor: bf16[2, 8, 64] = add.Tensor(arg2_1, arg1_1)
empty_like_default: bf16[2, 8, 64] = empty_like(add_tensor, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[2, 8, 64] = empty_like(add_tensor, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=add_tensor, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
    )


@pytest.mark.usefixtures("fake_group")
def test_graph_of_a_bias_without_residual() -> None:
    assert_expected_inline(
        run(bias_alone).after[0],
        """\
arg0_1: bf16[2, 8, 64]
arg1_1: bf16[64]
empty_like_default: bf16[2, 8, 64] = empty_like(arg0_1)
copy_default: bf16[2, 8, 64] = copy(empty_like_default, arg1_1)
empty_like_default_1: bf16[2, 8, 64] = empty_like(copy_default, memory_format=torch.contiguous_format)
empty_like_default_2: bf16[2, 8, 64] = empty_like(copy_default, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=copy_default, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
    )


@pytest.mark.usefixtures("fake_group")
def test_graph_of_a_multiplier() -> None:
    assert_expected_inline(
        run(multiplier).after[0],
        """\
arg0_1: bf16[2, 8, 64]
arg1_1: bf16[2, 8, 64]
mul_tensor: bf16[2, 8, 64] = mul.Tensor(arg0_1, 0.22)
empty_like_default: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=mul_tensor, residual=arg1_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
    )


@pytest.mark.usefixtures("fake_group")
def test_graph_of_two_sums() -> None:
    assert_expected_inline(
        run(second_sum).after[0],
        """\
arg0_1: bf16[2, 8, 64]
arg1_1: bf16[2, 8, 64]
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
sin: bf16[2, 8, 64] = sin(arg0_1)
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add_tensor: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
empty_like_default: bf16[2, 8, 64] = empty_like(add_tensor, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[2, 8, 64] = empty_like(add_tensor, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=sin, residual=add_tensor, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
    )


@pytest.mark.usefixtures("fake_group")
def test_graph_of_a_product() -> None:
    assert "= addmm(wait_tensor" in run(product).before[0]
    assert_expected_inline(
        run(product).after[0],
        """\
arg0_1: bf16[2, 8, 64]
arg1_1: bf16[2, 8, 64]
arg2_1: f32[64, 64]
view_1: bf16[16, 64] = reshape(arg1_1, [16, 64])
view: bf16[16, 64] = reshape(arg0_1, [16, 64])
view_2: bf16[16, 64] = reshape(arg0_1, [16, 64])
sin: bf16[16, 64] = sin(view_2)
convert_element_type: bf16[64, 64] = convert_element_type(arg2_1, bf16)
mm_default: bf16[16, 64] = mm(sin, convert_element_type)
add_tensor: bf16[16, 64] = add.Tensor(view, mm_default)
empty_like_default: bf16[16, 64] = empty_like(add_tensor, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[16, 64] = empty_like(add_tensor, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[16, 64], bf16[16, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=view_1, residual=add_tensor, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[16, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[16, 64] = getitem(auto_functionalized_v2, 2)
view_3: bf16[2, 8, 64] = reshape(getitem, [2, 8, 64])
view_4: bf16[2, 8, 64] = reshape(getitem_1, [2, 8, 64])
return [view_3, view_4]""",
    )


@pytest.mark.usefixtures("fake_group")
def test_sum_that_is_multiplied_in_a_product() -> None:
    def block(x: Tensor, r: Tensor) -> Tensor:
        return norm(r.flatten(0, 1) + reduce(x.flatten(0, 1)) @ MATRIX.bfloat16())

    captured = capture(block, *tensors(2, 8, HIDDEN))
    assert captured.rules == ["other_between"]
    assert captured.after == captured.before


@pytest.mark.usefixtures("fake_group")
def test_float16_is_not_multiplied_before_the_sum() -> None:
    captured = capture(multiplier, *tensors(2, 8, HIDDEN, dtype=torch.float16))
    assert captured.rules == ["scale_between"]
    assert captured.after == captured.before


@pytest.mark.usefixtures("fake_group")
def test_multiplied_in_another_shape() -> None:
    def block(x: Tensor) -> Tensor:
        return norm(reduce(x).view(2, 8, HIDDEN) * 8)

    captured = capture(block, *tensors(16, HIDDEN, count=1))
    assert captured.rules == ["reshaped"]
    assert captured.after == captured.before


@pytest.mark.usefixtures("fake_group")
def test_value_on_the_way_is_used_elsewhere() -> None:
    def block(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        shifted = reduce(x) + BIAS
        return norm(r + shifted), shifted

    captured = capture(block, *tensors(2, 8, HIDDEN))
    assert captured.rules == ["other_between"]
    assert captured.after == captured.before


@pytest.mark.usefixtures("fake_group")
def test_bias_in_two_dimensions_and_residual_in_three() -> None:
    def block(x: Tensor, r: Tensor) -> Tensor:
        return norm(r + (reduce(x) + BIAS).view(2, 8, HIDDEN))

    captured = capture(block, tensors(16, HIDDEN, count=1)[0], tensors(2, 8, HIDDEN, count=1)[0])
    assert captured.rules == ["folded_add_norm"]


@pytest.mark.usefixtures("fake_group")
def test_added_in_two_dimensions_and_again_in_three() -> None:
    def block(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
        return norm(r + (reduce(x) + y).view(2, 8, HIDDEN))

    x, y = tensors(16, HIDDEN)
    captured = capture(block, x, y, tensors(2, 8, HIDDEN, count=1)[0])
    assert captured.rules == ["folded_add_norm"]
    captured = capture(block, x, y[:1], tensors(2, 8, HIDDEN, count=1)[0])
    assert captured.rules == ["reshaped"]
    assert captured.after == captured.before


@pytest.mark.usefixtures("fake_group")
def test_second_sum_added_in_float32() -> None:
    def block(x: Tensor, r: Tensor) -> Tensor:
        return norm(r + (reduce(x).float() + reduce(x.sin()).float()).to(x.dtype))

    captured = capture(block, *tensors(2, 8, HIDDEN))
    assert captured.rules == ["norm_shared", "folded_add_norm"]


@pytest.mark.usefixtures("fake_group")
def test_norm_of_the_float32_sum_is_left_alone() -> None:
    def block(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        total = r.float() + reduce(x).float()
        return norm(total).to(x.dtype), total.to(x.dtype)

    captured = capture(block, *tensors(2, 8, HIDDEN))
    assert captured.rules == ["cast_between"]
    assert captured.after == captured.before


def errors(program: Program, dtype: torch.dtype) -> tuple[float, float, float]:
    """(largest distance of fused to eager residual, rms errors of both) in ulp at the size of what is added up."""
    (x,) = tensors(4, 512, HIDDEN, dtype=dtype, count=1, seed=dist.get_rank())
    r = 8 * tensors(4, 512, HIDDEN, dtype=dtype, count=1, seed=9)[0]
    with torch.no_grad():
        _, eager = program(x, r)
        _, exact = program(x.double(), r.double())
    normed, fused = capture(program, x, r).result
    expected = norm(fused.double())
    assert ((normed.double() - expected).abs() / ulp(expected, dtype)).max() <= (0.51 if dtype != torch.float32 else 4)
    size = x.double().abs()
    dist.all_reduce(size)
    step = ulp(size + r.double().abs() + 1, dtype)
    rms = [((found.double() - exact) / step).square().mean().sqrt().item() for found in (fused, eager)]
    return ((fused.double() - eager.double()).abs() / step).max().item(), rms[0], rms[1]


@pytest.mark.parametrize("program", [*FOLDED, *EXACT], ids=lambda program: program.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_values(ranks: Ranks, program: Program, dtype: torch.dtype) -> None:
    for to_eager, fused, eager in ranks.run(errors, program, dtype):
        print(f"{program.__name__} {dtype}: {to_eager} {fused:.2f} {eager:.2f}")
        assert to_eager <= (0 if program in EXACT else 2)
        assert fused <= 1.5 * eager
