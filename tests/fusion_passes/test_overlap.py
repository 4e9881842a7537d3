"""All-reduces that are served alone: any norm or none behind them, and Inductor's roundings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import custom_ops
import fusion_passes
from custom_ops.limits import Limits
from fusion_passes import FusionConfig, compat
from fusion_passes.environment import Environment
from tests.fusion_passes.test_norm_forms import body
from tests.support.capture import capture
from tests.support.programs import HIDDEN, NORMS, AddNorm, reduce, tensors
from tests.support.ranks import Ranks

NORM = NORMS["meta"]()
OVERLAP, AUTO = FusionConfig(norm_path="overlap"), FusionConfig(norm_path="auto")


def layer_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + reduce(x)
    return torch.nn.functional.layer_norm(total, (HIDDEN,)), total


def no_norm(x: Tensor, residual: Tensor) -> Tensor:
    return (reduce(x @ x.transpose(-1, -2)) + residual.sum()).sin()


def sum_used_twice(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = reduce(x)
    return NORM(residual + total), total * 2


def average(x: Tensor, residual: Tensor) -> Tensor:
    return (residual + reduce(x, "avg")).sin()


def in_float64(x: Tensor, residual: Tensor) -> Tensor:
    return residual + reduce(x.double()).to(x.dtype)


@pytest.mark.usefixtures("fake_group")
class TestGolden(expecttest.TestCase):
    maxDiff = None

    def test_layer_norm(self) -> None:
        captured = capture(layer_norm, *tensors(2, 8, HIDDEN), config=AUTO)
        assert captured.rules == ["overlap"]
        self.assertExpectedInline(
            body(captured.before[0]),
            """\
all_reduce: bf16[2, 8, 64] = _c10d_functional.all_reduce(arg0_1, 'sum', '0')
wait_tensor: bf16[2, 8, 64] = _c10d_functional.wait_tensor(all_reduce)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, wait_tensor)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
var_mean: (f32[2, 8, 1], f32[2, 8, 1]) = var_mean.correction(convert_element_type, [2], correction=0, keepdim=True)
getitem: f32[2, 8, 1] = getitem(var_mean, 0)
getitem_1: f32[2, 8, 1] = getitem(var_mean, 1)
sub: f32[2, 8, 64] = sub.Tensor(convert_element_type, getitem_1)
add_1: f32[2, 8, 1] = add.Tensor(getitem, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(sub, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
return [convert_element_type_1, add]""",
        )
        self.assertExpectedInline(
            body(captured.after[0]),
            """\
flashinfer_all_reduce_default: bf16[2, 8, 64] = custom_ops.flashinfer_all_reduce(arg0_1, '0', launch_with_pdl=True, fp32_acc=True, pdl_advance_launch_tokens=16, backend='trtllm', check_ranks=False)
add: bf16[2, 8, 64] = add.Tensor(arg1_1, flashinfer_all_reduce_default)
convert_element_type: f32[2, 8, 64] = convert_element_type(add, f32)
var_mean: (f32[2, 8, 1], f32[2, 8, 1]) = var_mean.correction(convert_element_type, [2], correction=0, keepdim=True)
getitem: f32[2, 8, 1] = getitem(var_mean, 0)
getitem_1: f32[2, 8, 1] = getitem(var_mean, 1)
sub: f32[2, 8, 64] = sub.Tensor(convert_element_type, getitem_1)
add_1: f32[2, 8, 1] = add.Tensor(getitem, 1e-05)
rsqrt: f32[2, 8, 1] = rsqrt(add_1)
mul: f32[2, 8, 64] = mul.Tensor(sub, rsqrt)
convert_element_type_1: bf16[2, 8, 64] = convert_element_type(mul, bf16)
return [convert_element_type_1, add]""",
        )


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize(
    ("program", "fused", "left"),
    [
        (AddNorm(NORMS["functional"]()), "add_norm", None),
        (layer_norm, "norm_not_recognised", "norm_not_recognised"),
        (no_norm, "no_norm", "no_norm"),
        (sum_used_twice, "sum_used", "sum_used"),
        (average, "no_norm", None),
        (in_float64, "cast_between", None),
    ],
    ids=["norm", "layer norm", "no norm", "sum used", "average", "float64"],
)
def test_paths(program: Callable[..., Any], fused: str, left: str | None) -> None:
    """What cannot be served at all keeps the collective's reason; what can keeps the norm's beside the rule."""
    inputs = tensors(2, 8, HIDDEN)
    (site,) = capture(program, *inputs).sites
    assert site.verdict == fused
    (alone,) = capture(program, *inputs, config=OVERLAP).sites
    (auto,) = capture(program, *inputs, config=AUTO).sites
    refused = {average: "reduce_op", in_float64: "dtype"}.get(program)  # type: ignore[call-overload]
    assert alone.verdict == (refused or "overlap")
    assert alone.left is None
    assert auto.verdict == (refused or ("overlap" if left else fused))
    assert (auto.left and auto.left.code) == (None if refused else left)


def test_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_path='fast': must be one of 'fused', 'overlap', 'auto'"):
        FusionConfig(norm_path="fast")  # type: ignore[arg-type]


@pytest.mark.usefixtures("fake_group")
def test_flags_reach_the_call() -> None:
    config = FusionConfig(norm_path="overlap", launch_with_pdl=False, fp32_acc=False, pdl_advance_launch_tokens=3)
    text = capture(layer_norm, *tensors(2, 8, HIDDEN), config=config).after[0]
    assert "launch_with_pdl=False, fp32_acc=False, pdl_advance_launch_tokens=3" in text


@pytest.mark.usefixtures("fake_group")
def test_code_has_one_call_and_one_kernel() -> None:
    with torch.no_grad(), compat.without_caches():
        compiled = torch.compile(layer_norm, fullgraph=True, options=fusion_passes.options(AUTO))
        _, (text,) = run_and_get_code(compiled, *tensors(2, 8, HIDDEN))
    text = text[text.index("def call(") : text.index("def get_args")]
    assert text.count("flashinfer_all_reduce.default(") == 1
    assert "_c10d_functional" not in text
    assert text.count("cpp_fused") == 1, "add and norm are one kernel of Inductor's"


def compare(name: str, dtype: torch.dtype, dynamic: bool | None) -> tuple[int, list[str | None]]:
    program = {"layer_norm": layer_norm, "sum_used_twice": sum_used_twice, "no_norm": no_norm}[name]
    (x,) = tensors(4, 8, HIDDEN, dtype=dtype, count=1, seed=10 + dist.get_rank())
    (residual,) = tensors(4, 8, HIDDEN, dtype=dtype, count=1, seed=3)
    with torch.no_grad():
        expected = program(x, residual)
        captured = capture(program, x, residual, config=OVERLAP, dynamic=dynamic)
    result = captured.result
    for mine, its in zip(*((one if isinstance(one, tuple) else (one,)) for one in (result, expected)), strict=True):
        torch.testing.assert_close(mine, its)
    assert sum(custom_ops.launches().values()) == 1
    return len(captured.sites), [site.rule for site in captured.sites]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["layer_norm", "sum_used_twice", "no_norm"])
def test_values(ranks: Ranks, name: str, dynamic: bool | None) -> None:
    for sites, rules in ranks.run(compare, name, torch.bfloat16, dynamic):
        assert (sites, rules) == (1, ["overlap"])


@pytest.mark.usefixtures("fake_group")
def test_strict_accepts_an_overlap_where_no_norm_is_to_be_had() -> None:
    config = FusionConfig(norm_path="auto", strict=True)
    assert capture(no_norm, *tensors(2, 8, HIDDEN), config=config).rules == ["overlap"]
    with pytest.raises(Exception, match="norm_not_recognised"):
        capture(layer_norm, *tensors(2, 8, HIDDEN), config=config)


class OfTwoSizes(Environment):
    """A machine on which the all-reduce alone is faster up to 4 tokens of 64 elements."""

    def limits(self, device: torch.device, world_size: int) -> Limits:
        return Limits(1 << 20, 1 << 20, "test", overlap_bytes=4 * HIDDEN * 2)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("path", ["auto", "fused", "overlap"])
@pytest.mark.parametrize(("tokens", "faster"), [(4, True), (5, False)])
def test_auto_takes_what_the_limits_say_is_faster(path: Any, tokens: int, faster: bool) -> None:
    passes = (fusion_passes.AllReduceRMSFusionPass(FusionConfig(norm_path=path, strict=True), OfTwoSizes()),)
    (site,) = capture(AddNorm(NORM), *tensors(tokens, HIDDEN), passes=passes).sites
    alone = path == "overlap" or (path == "auto" and faster)
    assert site.verdict == ("overlap" if alone else "add_norm")
    if path == "auto" and faster:
        assert str(site.left) == "overlap_faster: 512 bytes; up to 512 the all-reduce alone is faster (test)"
    else:
        assert site.left is None


@pytest.mark.usefixtures("fake_group")
def test_auto_fuses_what_has_no_size_yet() -> None:
    passes = (fusion_passes.AllReduceRMSFusionPass(AUTO, OfTwoSizes()),)
    (site,) = capture(AddNorm(NORM), *tensors(4, HIDDEN), passes=passes, dynamic=True).sites
    assert site.verdict == "add_norm"


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("path", ["overlap", "fused"])
def test_no_early_trigger_before_kernels_of_inductor_with_pdl(path: Any) -> None:
    """They wait for their direct predecessor, and not even for that if they read nothing of it."""
    config = FusionConfig(norm_path=path)
    fn = AddNorm(NORM)
    assert "pdl_advance_launch_tokens=16" in capture(fn, *tensors(4, HIDDEN), config=config).after[0].replace(
        "': 16", "=16"
    )
    with inductor_config.patch("triton.enable_pdl", True):
        text = capture(fn, *tensors(4, HIDDEN), config=config).after[0].replace("': 0", "=0")
    assert "pdl_advance_launch_tokens=0" in text
