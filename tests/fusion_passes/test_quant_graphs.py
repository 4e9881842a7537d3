"""Quantised chains: the graph before and after, as text. Rewrite the texts with EXPECTTEST_ACCEPT=1."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

import custom_ops
from tests.support import quant_programs as programs
from tests.support.capture import Captured, capture, renumbered
from tests.support.programs import HIDDEN, tensors
from tests.support.quant_programs import Quantised

S = torch.tensor(0.05)


def from_norm(text: str) -> str:
    """A graph from the last node of the norm on; all of it where the norm has gone."""
    lines = [line for line in text.splitlines() if " = " in line or line.startswith("return")]
    ends = [place for place, line in enumerate(lines) if "convert_element_type_1: bf16" in line]
    return "\n".join(lines[ends[0] :] if ends else lines)


@pytest.mark.usefixtures("fake_group")
class TestGolden(expecttest.TestCase):
    """Golden graphs of all-reduce, add, norm and quantisation on [2, 8, hidden]."""

    maxDiff = None

    def fuse(self, quantise: Any, *scales: Tensor, rule: str = "add_norm", dynamic: bool | None = None) -> Captured:
        captured = capture(Quantised(quantise), *tensors(2, 8, HIDDEN), *scales, dynamic=dynamic)
        assert captured.rules == [rule]
        return captured

    @pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="torch 2.11 drops the cast of such a norm")
    def test_static(self) -> None:
        captured = self.fuse(programs.divide, S, rule="add_norm_fp8")
        self.assertExpectedInline(
            from_norm(captured.before[0]),
            """\
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
convert_element_type_2: f32[2, 8, 64] = convert_element_type(convert_element_type_1, f32)
div: f32[2, 8, 64] = div.Tensor(convert_element_type_2, arg3_1)
clamp_min: f32[2, 8, 64] = clamp_min(div, -448.0)
clamp_max: f32[2, 8, 64] = clamp_max(clamp_min, 448.0)
convert_element_type_3: float8_e4m3fn[2, 8, 64] = convert_element_type(clamp_max, float8_e4m3fn)
return [convert_element_type_3, add]""",
        )
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
empty_like_default: float8_e4m3fn[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format, dtype=float8_e4m3fn)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, float8_e4m3fn[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=2, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False, scale_factor=arg3_1)
getitem: float8_e4m3fn[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
        )

    @pytest.mark.skipif(TorchVersion(torch.__version__) < "2.12", reason="torch 2.11 drops the cast of such a norm")
    def test_static_with_other_bounds_stays(self) -> None:
        captured = self.fuse(lambda n, s: (n.float() / s).clamp(-240, 240).to(torch.float8_e4m3fn), S)
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
empty_like_default: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
convert_element_type_2: f32[2, 8, 64] = convert_element_type(getitem, f32)
div: f32[2, 8, 64] = div.Tensor(convert_element_type_2, arg3_1)
clamp_min: f32[2, 8, 64] = clamp_min(div, -240)
clamp_max: f32[2, 8, 64] = clamp_max(clamp_min, 240)
convert_element_type_3: float8_e4m3fn[2, 8, 64] = convert_element_type(clamp_max, float8_e4m3fn)
return [convert_element_type_3, getitem_1]""",
        )

    def test_inverse_scale_is_inverted_once_more(self) -> None:
        captured = self.fuse(programs.multiply_by_inverse, S, rule="add_norm_fp8")
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
empty_like_default: float8_e4m3fn[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format, dtype=float8_e4m3fn)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
reciprocal_default: f32[] = reciprocal(arg3_1)
auto_functionalized_v2: (None, float8_e4m3fn[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=2, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False, scale_factor=reciprocal_default)
getitem: float8_e4m3fn[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
return [getitem, getitem_1]""",
        )

    def test_norm_that_a_router_takes_too(self) -> None:
        captured = self.fuse(lambda n, s: (programs.divide(n, s), n.sum(-1)), S, rule="add_norm_fp8_out")
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
empty_like_default: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
empty_like_default_1: float8_e4m3fn[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format, dtype=float8_e4m3fn)
empty_like_default_2: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], float8_e4m3fn[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=4, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False, scale_factor=arg3_1)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: float8_e4m3fn[2, 8, 64] = getitem(auto_functionalized_v2, 2)
getitem_2: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 3)
sum_1: bf16[2, 8] = sum.dim_IntList(getitem, [-1])
return [getitem_1, sum_1, getitem_2]""",
        )

    def test_torchao_rows(self) -> None:
        captured = self.fuse(programs.torchao_rows, rule="add_norm_fp8_token")
        self.assertExpectedInline(
            from_norm(captured.before[0]),
            """\
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
convert_element_type_3: f32[2, 8, 64] = convert_element_type(convert_element_type_1, f32)
abs_1: bf16[2, 8, 64] = abs(convert_element_type_1)
amax: bf16[2, 8, 1] = amax(abs_1, [-1], True)
div: bf16[2, 8, 1] = div.Tensor(amax, 448.0)
convert_element_type_2: f32[2, 8, 1] = convert_element_type(div, f32)
div_1: f32[2, 8, 64] = div.Tensor(convert_element_type_3, convert_element_type_2)
clamp_min: f32[2, 8, 64] = clamp_min(div_1, -448.0)
clamp_max: f32[2, 8, 64] = clamp_max(clamp_min, 448.0)
convert_element_type_4: float8_e4m3fn[2, 8, 64] = convert_element_type(clamp_max, float8_e4m3fn)
view: float8_e4m3fn[16, 64] = reshape(convert_element_type_4, [-1, 64])
unsqueeze: f32[2, 8, 1, 1] = unsqueeze(convert_element_type_2, -1)
view_1: f32[16, 1] = reshape(unsqueeze, [-1, 1])
return [view, view_1, add]""",
        )
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
empty_like_default: float8_e4m3fn[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format, dtype=float8_e4m3fn)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
slice_tensor: bf16[2, 8, 1] = slice.Tensor(arg1_1, -1, 0, 1)
empty_like_default_2: f32[2, 8, 1] = empty_like(slice_tensor, memory_format=torch.contiguous_format, dtype=f32)
auto_functionalized_v2: (None, float8_e4m3fn[2, 8, 64], bf16[2, 8, 64], f32[2, 8, 1]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=10, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: float8_e4m3fn[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
getitem_2: f32[2, 8, 1] = getitem(auto_functionalized_v2, 3)
view: float8_e4m3fn[16, 64] = reshape(getitem, [-1, 64])
unsqueeze: f32[2, 8, 1, 1] = unsqueeze(getitem_2, -1)
view_1: f32[16, 1] = reshape(unsqueeze, [-1, 1])
return [view, view_1, getitem_1]""",
        )

    def test_compressed_tensors_rows(self) -> None:
        captured = self.fuse(programs.compressed_tensors_rows, rule="add_norm_fp8_token")
        self.assertExpectedInline(
            from_norm(captured.before[0]),
            """\
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul_1, bf16)
view: bf16[16, 64] = reshape(convert_element_type_1, [-1, 64])
convert_element_type_2: f32[16, 64] = convert_element_type(view, f32)
abs_1: f32[16, 64] = abs(convert_element_type_2)
amax: f32[16] = amax(abs_1, [-1])
gt: b8[16] = gt.Scalar(amax, 0)
full_default: f32[16] = full([16], 1, dtype=f32, layout=torch.strided, device=device(type='cpu'), pin_memory=False)
where: f32[16] = where.self(gt, amax, full_default)
div: f32[16] = div.Tensor(where, 448.0)
unsqueeze: f32[16, 1] = unsqueeze(div, -1)
div_1: f32[16, 64] = div.Tensor(convert_element_type_2, unsqueeze)
clamp_min: f32[16, 64] = clamp_min(div_1, -448.0)
clamp_max: f32[16, 64] = clamp_max(clamp_min, 448.0)
convert_element_type_3: float8_e4m3fn[16, 64] = convert_element_type(clamp_max, float8_e4m3fn)
unsqueeze_1: f32[16, 1] = unsqueeze(div, -1)
return [convert_element_type_3, unsqueeze_1, add]""",
        )
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
empty_like_default: float8_e4m3fn[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format, dtype=float8_e4m3fn)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
slice_tensor: bf16[2, 8, 1] = slice.Tensor(arg1_1, -1, 0, 1)
empty_like_default_2: f32[2, 8, 1] = empty_like(slice_tensor, memory_format=torch.contiguous_format, dtype=f32)
auto_functionalized_v2: (None, float8_e4m3fn[2, 8, 64], bf16[2, 8, 64], f32[2, 8, 1]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=10, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: float8_e4m3fn[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
getitem_2: f32[2, 8, 1] = getitem(auto_functionalized_v2, 3)
reshape_default_1: f32[16, 1] = reshape(getitem_2, [-1, 1])
squeeze_dim: f32[16] = squeeze.dim(reshape_default_1, -1)
reshape_default: float8_e4m3fn[16, 64] = reshape(getitem, [-1, 64])
unsqueeze_1: f32[16, 1] = unsqueeze(squeeze_dim, -1)
return [reshape_default, unsqueeze_1, getitem_1]""",
        )

    def test_scale_of_the_whole_tensor_stays(self) -> None:
        captured = self.fuse(lambda n: programs.divide(n, n.float().abs().amax() / 448))
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
empty_like_default: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
auto_functionalized_v2: (None, bf16[2, 8, 64], bf16[2, 8, 64]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=1, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
getitem: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_1: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
convert_element_type_3: f32[2, 8, 64] = convert_element_type(getitem, f32)
convert_element_type_2: f32[2, 8, 64] = convert_element_type(getitem, f32)
abs_1: f32[2, 8, 64] = abs(convert_element_type_2)
amax: f32[] = amax(abs_1)
div: f32[] = div.Tensor(amax, 448)
div_1: f32[2, 8, 64] = div.Tensor(convert_element_type_3, div)
clamp_min: f32[2, 8, 64] = clamp_min(div_1, -448.0)
clamp_max: f32[2, 8, 64] = clamp_max(clamp_min, 448.0)
convert_element_type_4: float8_e4m3fn[2, 8, 64] = convert_element_type(clamp_max, float8_e4m3fn)
return [convert_element_type_4, getitem_1]""",
        )

    def test_groups_of_a_dynamic_number_of_tokens(self) -> None:
        captured = self.fuse(
            lambda n: custom_ops.scaled_fp8_quant(n, group_size=32), rule="add_norm_fp8_group", dynamic=True
        )
        self.assertExpectedInline(
            renumbered(from_norm(captured.before[0])),
            """\
convert_element_type_1: bf16[s77, s27, 64] = convert_element_type(mul, bf16)
scaled_fp8_quant: (float8_e4m3fn[s77, s27, 64], int32[s27*s77, 1]) = custom_ops.scaled_fp8_quant.per_group(convert_element_type_1, 32)
getitem: float8_e4m3fn[s77, s27, 64] = getitem(scaled_fp8_quant, 0)
getitem_1: int32[s27*s77, 1] = getitem(scaled_fp8_quant, 1)
return [getitem, getitem_1, add]""",
        )
        self.assertExpectedInline(
            renumbered(from_norm(captured.after[0])),
            """\
empty_like_default: float8_e4m3fn[s77, s27, 64] = empty_like(arg3_1, memory_format=torch.contiguous_format, dtype=float8_e4m3fn)
empty_like_default_1: bf16[s77, s27, 64] = empty_like(arg3_1, memory_format=torch.contiguous_format)
sym_size_int: SymInt = sym_size.int(arg3_1, 0)
sym_size_int_1: SymInt = sym_size.int(arg3_1, 1)
mul: SymInt = mul(sym_size_int, sym_size_int_1)
add: SymInt = add(mul, 3)
floordiv: SymInt = floordiv(add, 4)
mul_1: SymInt = mul(floordiv, 4)
empty_strided_default: int32[s27*s77, 1] = empty_strided([mul, 1], [1, mul_1], dtype=int32, device=device(type='cpu'))
auto_functionalized_v2: (None, float8_e4m3fn[s77, s27, 64], bf16[s77, s27, 64], int32[s27*s77, 1]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg2_1, residual=arg3_1, rms_gamma=arg4_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=8, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False, block_quant_group_size=32)
getitem_2: float8_e4m3fn[s77, s27, 64] = getitem(auto_functionalized_v2, 1)
getitem_3: bf16[s77, s27, 64] = getitem(auto_functionalized_v2, 2)
getitem_4: int32[s27*s77, 1] = getitem(auto_functionalized_v2, 3)
return [getitem_2, getitem_4, getitem_3]""",
        )

    def test_mxfp8(self) -> None:
        captured = self.fuse(custom_ops.mxfp8_quant, rule="add_norm_mxfp8")
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
empty_like_default: float8_e4m3fn[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format, dtype=float8_e4m3fn)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
empty_strided_default: uint8[128, 4] = empty_strided([128, 4], [4, 1], dtype=uint8, device=device(type='cpu'))
auto_functionalized_v2: (None, float8_e4m3fn[2, 8, 64], bf16[2, 8, 64], uint8[128, 4]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=13, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False, layout_code=0)
getitem_2: float8_e4m3fn[2, 8, 64] = getitem(auto_functionalized_v2, 1)
getitem_3: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
getitem_4: uint8[128, 4] = getitem(auto_functionalized_v2, 3)
view_dtype: float8_e8m0fnu[128, 4] = view.dtype(getitem_4, float8_e8m0fnu)
return [getitem_2, view_dtype, getitem_3]""",
        )

    def test_nvfp4(self) -> None:
        captured = self.fuse(custom_ops.scaled_fp4_quant, torch.tensor(300.0), rule="add_norm_nvfp4")
        self.assertExpectedInline(
            from_norm(captured.after[0]),
            """\
slice_tensor: bf16[2, 8, 32] = slice.Tensor(arg1_1, -1, 0, 32)
empty_like_default: uint8[2, 8, 32] = empty_like(slice_tensor, memory_format=torch.contiguous_format, dtype=uint8)
empty_like_default_1: bf16[2, 8, 64] = empty_like(arg1_1, memory_format=torch.contiguous_format)
empty_strided_default: float8_e4m3fn[128, 4] = empty_strided([128, 4], [4, 1], dtype=float8_e4m3fn, device=device(type='cpu'))
auto_functionalized_v2: (None, uint8[2, 8, 32], bf16[2, 8, 64], float8_e4m3fn[128, 4]) = auto_functionalized_v2(custom_ops.call_trtllm_fused_allreduce_norm, allreduce_in=arg0_1, residual=arg1_1, rms_gamma=arg2_1, rms_eps=9.999999747378752e-06, world_size=2, launch_with_pdl=True, fp32_acc=True, max_token_num=0, pattern_code=3, group_name='0', weight_bias=0.0, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False, scale_factor=arg3_1, layout_code=0)
getitem_2: uint8[2, 8, 32] = getitem(auto_functionalized_v2, 1)
getitem_3: bf16[2, 8, 64] = getitem(auto_functionalized_v2, 2)
getitem_4: float8_e4m3fn[128, 4] = getitem(auto_functionalized_v2, 3)
return [getitem_2, getitem_4, getitem_3]""",
        )
