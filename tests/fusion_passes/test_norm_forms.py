"""Every form of RMSNorm: the graph before and after, as text. Rewrite the texts with EXPECTTEST_ACCEPT=1."""

from __future__ import annotations

import re

import expecttest
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from tests.support.capture import Captured, capture, renumbered
from tests.support.programs import HIDDEN, NORMS, AddNorm, JustNorm, tensors


def body(text: str) -> str:
    """A graph without its inputs."""
    return "\n".join(line for line in text.splitlines() if " = " in line or line.startswith("return"))


def norm_arguments(text: str) -> str:
    """The arguments of the fused op that describe the norm."""
    (call,) = [line for line in text.splitlines() if "call_trtllm_fused_allreduce_norm" in line]
    return "\n".join(re.findall(r"(?:rms_gamma|rms_eps|rms_eps_tensor|weight_bias)=[^,)]+", call))


@pytest.mark.usefixtures("fake_group")
class TestGolden(expecttest.TestCase):
    """Golden graphs of all-reduce, add and norm on [2, 8, hidden].

    All forms become the same nodes, which the first test shows in full; the others show the arguments that differ.
    """

    maxDiff = None

    def fuse(self, name: str) -> Captured:
        """Compile one form with a residual; it must fuse."""
        captured = capture(AddNorm(NORMS[name]()), *tensors(2, 8, HIDDEN))
        assert captured.rules == ["add_norm"]
        assert "c10d" not in captured.after[0]
        return captured

    def test_functional(self) -> None:
        captured = self.fuse("functional")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [2], True)
add_1: f32[2, 8, 1] = add.Scalar(mean, 9.999999747378752e-06)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
mul_1: f32[2, 8, 64] = mul.Tensor(mul, arg2_1)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
return [convert_element_type_1, add]""",
        )
        self.assertExpectedInline(
            body(captured.after[0]),
            """\
empty_like_default: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
        )

    def test_functional_float32(self) -> None:
        captured = self.fuse("functional_float32")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [2], True)
add_1: f32[2, 8, 1] = add.Scalar(mean, 9.999999747378752e-06)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: f32[64] = convert_element_type(arg2_1, f32)
mul_1: f32[2, 8, 64] = mul.Tensor(mul, convert_element_type_1)
convert_element_type_2: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
return [convert_element_type_2, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=9.999999747378752e-06
weight_bias=0.0""",
        )

    def test_hugging_face_llama(self) -> None:
        captured = self.fuse("hugging_face_llama")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
mul_1: bf16[2, 8, 64] = mul.Tensor(arg2_1, convert_element_type_1)
return [mul_1, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_meta(self) -> None:
        captured = self.fuse("meta")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
mul_1: bf16[2, 8, 64] = mul.Tensor(convert_element_type_1, arg2_1)
return [mul_1, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_gpt_fast(self) -> None:
        captured = self.fuse("gpt_fast")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, convert_element_type)
mean: f32[2, 8, 1] = mean.dim(mul, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul_1: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
mul_2: bf16[2, 8, 64] = mul.Tensor(convert_element_type_1, arg2_1)
return [mul_2, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_gpt_oss(self) -> None:
        captured = self.fuse("gpt_oss")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
mul_1: f32[2, 8, 64] = mul.Tensor(arg2_1, mul)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
return [convert_element_type_1, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_float32_weight(self) -> None:
        captured = self.fuse("float32_weight")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
convert_element_type_1: f32[64] = convert_element_type(arg2_1, f32)
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
mul_1: f32[2, 8, 64] = mul.Tensor(convert_element_type_1, mul)
convert_element_type_2: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
return [convert_element_type_2, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_gemma(self) -> None:
        captured = self.fuse("gemma")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: f32[64] = convert_element_type(arg2_1, f32)
add_2: f32[64] = add.Tensor(convert_element_type_1, 1.0)
mul_1: f32[2, 8, 64] = mul.Tensor(mul, add_2)
convert_element_type_2: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
return [convert_element_type_2, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=1.0""",
        )

    def test_no_weight(self) -> None:
        captured = self.fuse("no_weight")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
return [convert_element_type_1, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_t5(self) -> None:
        captured = self.fuse("t5")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(add, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
mul_1: bf16[2, 8, 64] = mul.Tensor(arg2_1, convert_element_type_1)
return [mul_1, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_scale_first(self) -> None:
        captured = self.fuse("scale_first")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(rsqrt, convert_element_type)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
mul_1: bf16[2, 8, 64] = mul.Tensor(convert_element_type_1, arg2_1)
return [mul_1, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_divide_by_root(self) -> None:
        captured = self.fuse("divide_by_root")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
sqrt: f32[2, 8, 1] = sqrt(add_1)
div: f32[2, 8, 64] = div.Tensor(convert_element_type, sqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(div, bf16)
mul: bf16[2, 8, 64] = mul.Tensor(convert_element_type_1, arg2_1)
return [mul, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    @pytest.mark.skipif(
        TorchVersion(torch.__version__) >= "2.14", reason="torch makes one rsqrt of it itself from 2.14 on"
    )
    def test_reciprocal_root(self) -> None:
        captured = self.fuse("reciprocal_root")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
sqrt: f32[2, 8, 1] = sqrt(add_1)
reciprocal: f32[2, 8, 1] = reciprocal(sqrt)
mul: f32[2, 8, 1] = mul.Tensor(reciprocal, 1)
mul_1: f32[2, 8, 64] = mul.Tensor(convert_element_type, mul)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
mul_2: bf16[2, 8, 64] = mul.Tensor(convert_element_type_1, arg2_1)
return [mul_2, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_power_minus_half(self) -> None:
        captured = self.fuse("power_minus_half")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add_1: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
pow_2: f32[2, 8, 1] = pow.Tensor_Scalar(add_1, -0.5)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, pow_2)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
mul_1: bf16[2, 8, 64] = mul.Tensor(convert_element_type_1, arg2_1)
return [mul_1, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_sum_over_hidden(self) -> None:
        captured = self.fuse("sum_over_hidden")
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, convert_element_type)
sum_1: f32[2, 8, 1] = sum.dim_IntList(mul, [-1], True)
div: f32[2, 8, 1] = div.Tensor(sum_1, 64)
add_1: f32[2, 8, 1] = add.Tensor(div, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul_1: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
mul_2: bf16[2, 8, 64] = mul.Tensor(convert_element_type_1, arg2_1)
return [mul_2, add]""",
        )
        self.assertExpectedInline(
            norm_arguments(captured.after[0]),
            """\
rms_gamma=arg2_1
rms_eps=1e-05
weight_bias=0.0""",
        )

    def test_no_residual(self) -> None:
        (x,) = tensors(2, 8, HIDDEN, count=1)
        captured = capture(JustNorm(NORMS["hugging_face_llama"]()), x)
        assert captured.rules == ["norm"]
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
convert_element_type: f32[2, 8, 64] = convert_element_type(wait_tensor, f32)
pow_1: f32[2, 8, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[2, 8, 1] = mean.dim(pow_1, [-1], True)
add: f32[2, 8, 1] = add.Tensor(mean, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add)
mul: f32[2, 8, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
mul_1: bf16[2, 8, 64] = mul.Tensor(arg1_1, convert_element_type_1)
return [mul_1, wait_tensor]""",
        )
        self.assertExpectedInline(
            body(captured.after[0]),
            """\
empty_like_default: bf16[2, 8, 64] = empty_like(arg0_1, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg0_1, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, rms_gamma=arg1_1, rms_eps=1e-05, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
        )

    def test_dynamic_shapes_make_epsilon_a_tensor(self) -> None:
        captured = capture(AddNorm(NORMS["hugging_face_llama"]()), *tensors(2, 8, HIDDEN), dynamic=True)
        assert captured.rules == ["add_norm"]
        self.assertExpectedInline(
            renumbered(body(captured.before[0])),
            """\
all_reduce: bf16[s77, s27, 64] = _c10d_functional.all_reduce(arg2_1, 'sum', '0')
wait_tensor: bf16[s77, s27, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[s77, s27, 64] = add.Tensor(arg3_1, wait_tensor)
convert_element_type: f32[s77, s27, 64] = convert_element_type(add, f32)
pow_1: f32[s77, s27, 64] = pow.Tensor_Scalar(convert_element_type, 2)
mean: f32[s77, s27, 1] = mean.dim(pow_1, [-1], True)
convert_element_type_default_1: f32[] = convert_element_type(arg4_1, f32)
add_tensor: f32[s77, s27, 1] = add.Tensor(mean, convert_element_type_default_1)
rsqrt: f32[s77, s27, 1] = rsqrt(add_tensor)
mul: f32[s77, s27, 64] = mul.Tensor(convert_element_type, rsqrt)
convert_element_type_1: bf16[s77, s27, 64] = convert_element_type(mul, bf16)
mul_1: bf16[s77, s27, 64] = mul.Tensor(arg5_1, convert_element_type_1)
return [mul_1, add]""",
        )
        self.assertExpectedInline(
            renumbered(body(captured.after[0])),
            """\
empty_like_default: bf16[s77, s27, 64] = empty_like(arg3_1, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[s77, s27, 64] = empty_like(arg3_1, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[s77, s27, 64], bf16[s77, s27, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg2_1, residual=arg3_1, rms_gamma=arg5_1, rms_eps=0.0, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, rms_eps_tensor=arg4_1, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[s77, s27, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[s77, s27, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
        )


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_every_form_fuses_in_every_dtype_and_rank(name: str, dtype: torch.dtype) -> None:
    for shape in [(HIDDEN,), (8, HIDDEN), (2, 4, HIDDEN), (2, 2, 2, HIDDEN)]:
        captured = capture(AddNorm(NORMS[name](dtype=dtype)), *tensors(*shape, dtype=dtype))
        assert captured.rules == ["add_norm"], (shape, captured.sites)


class Twins:
    """Norms that look like an RMSNorm and are none, or round elsewhere: each leaves its graph as it is."""

    class LayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(HIDDEN, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    class HandWrittenLayerNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            variance = (x32 - x32.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
            return ((x32 - x32.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5)).to(x.dtype)

    class NeverLeavesBfloat16(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    class OtherDimension(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            return (x32 * torch.rsqrt(x32.pow(2).mean(1, keepdim=True) + 1e-5)).to(x.dtype)

    class TwoDimensions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            return (x32 * torch.rsqrt(x32.pow(2).mean((1, 2), keepdim=True) + 1e-5)).to(x.dtype)

    class ScaledByNumber(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5) * 2.0).to(x.dtype)

    class ScalesAnotherTensor(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            return (x32.relu() * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            return (x32 * torch.rsqrt(x32.pow(3).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    class WrongCount(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            return (x32 * torch.rsqrt(x32.pow(2).sum(-1, keepdim=True) / 63 + 1e-5)).to(x.dtype)

    class EpsilonPerToken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            eps = x32.abs().amax(-1, keepdim=True)
            return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    class CastToAnotherType(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)
            return normed.to(torch.float16).float().to(x.dtype)

    class StaysFloat32(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x32 = x.float()
            return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)


TWINS = [value for value in vars(Twins).values() if isinstance(value, type)]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_twin_is_left_alone(twin: type[nn.Module]) -> None:
    captured = capture(AddNorm(twin()), *tensors(2, 8, HIDDEN))
    assert captured.rules == ["norm_not_recognised"]
    assert captured.after == captured.before
