"""Quantisations behind a norm: which spellings fuse, what becomes of them, and why the others do not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import custom_ops
import fusion_passes
from fusion_passes import FusionConfig, rules
from fusion_passes.environment import Environment
from fusion_passes.reasons import NotFused
from tests.support import quant_programs as programs
from tests.support.capture import Captured, capture
from tests.support.programs import HIDDEN, NORMS, AddNorm, JustNorm, tensors
from tests.support.quant_programs import FLOAT8, MAX, SPELLINGS, Quantised

pytestmark = pytest.mark.usefixtures("fake_group")
S = torch.tensor(0.05)
TORCH = torch.torch_version.TorchVersion(torch.__version__)


def fuse(quantise: Any, *scales: Tensor, shape: tuple[int, ...] = (2, 8, HIDDEN), **kwargs: Any) -> Captured:
    """Compile a block that ends in a quantisation."""
    dtype = kwargs.pop("dtype", torch.bfloat16)
    module = Quantised(quantise, shape[-1], dtype)
    return capture(module, *tensors(*shape, dtype=dtype), *scales, **kwargs)


def calls(text: str) -> list[str]:
    """The lines that call the fused op."""
    return [line for line in text.splitlines() if "call_trtllm_fused_allreduce_norm" in line]


def why(site: fusion_passes.SiteReport) -> NotFused:
    """Why a quantisation was left to Inductor; the norm fuses all the same.

    Before torch 2.13 a norm that only a quantisation takes reaches the pass in float32, and is then left alone as well.
    """
    assert site.rule == "add_norm" or (site.reason is not None and TORCH < "2.13")
    found = site.left or site.reason
    assert found is not None
    return found


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(16, HIDDEN), (2, 8, HIDDEN)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_fuses(name: str, shape: tuple[int, ...], dynamic: bool | None) -> None:
    spelling = SPELLINGS[name]
    with programs.with_its_numbers():
        captured = fuse(spelling.quantise, *spelling.scales, shape=shape, dynamic=dynamic)
    assert captured.rules == [f"add_norm_{spelling.format}"]
    assert captured.sites[0].left is None
    assert len(calls(captured.after[0])) == 1
    assert not [word for word in ("div.", "clamp", "amax", "_quant(") if word in captured.after[0]], captured.after[0]
    assert "auto_functionalized" not in captured.final[0]


@pytest.mark.parametrize("name", SPELLINGS)
def test_norm_that_is_also_used_is_written_too(name: str) -> None:
    spelling = SPELLINGS[name]
    captured = fuse(lambda n, *s: (spelling.quantise(n, *s), n @ n.transpose(-1, -2)), *spelling.scales)
    assert captured.rules == [f"add_norm_{spelling.format}_out"]


@pytest.mark.parametrize("name", SPELLINGS)
def test_exact_rounding_takes_only_what_rounds_like_the_kernel(name: str) -> None:
    spelling = SPELLINGS[name]
    captured = fuse(spelling.quantise, *spelling.scales, config=FusionConfig(exact_rounding=True))
    wide = TORCH < "2.13" and spelling.format == "fp8" and not name.startswith("own")
    if spelling.exact and not wide:
        assert captured.rules == [f"add_norm_{spelling.format}"]
    else:
        assert why(captured.sites[0]).code == "quant_rounding"


@pytest.mark.parametrize("format", custom_ops.FORMATS)
@pytest.mark.parametrize("norm", ["functional", "gemma", "hugging_face_llama"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no residual"])
def test_every_format_behind_every_kind_of_norm(format: str, norm: str, residual: bool) -> None:
    spelling = next(one for one in SPELLINGS.values() if one.format == format and one.exact)
    block = (AddNorm if residual else JustNorm)(NORMS[norm]())

    def program(*inputs: Tensor) -> Any:
        count = 2 if residual else 1
        normed, total = block(*inputs[:count])
        return spelling.quantise(normed, *inputs[count:]), total

    inputs = tensors(2, 8, HIDDEN)[: 2 if residual else 1]
    captured = capture(program, *inputs, *spelling.scales)
    assert captured.rules == [f"{'add_' if residual else ''}norm_{format}"]
    assert f"weight_bias={1.0 if norm == 'gemma' else 0.0}" in captured.after[0]


def test_equal_chains_of_several_consumers_become_one_output() -> None:
    def consumers(n: Tensor, s: Tensor) -> list[Tensor]:
        return [programs.divide(n, s).reshape(-1, HIDDEN) for _ in range(3)]

    captured = fuse(consumers, S)
    assert captured.rules == ["add_norm_fp8"]
    assert captured.before[0].count("= clamp_min(") == 3
    assert "clamp" not in captured.after[0]


def test_of_two_scales_the_one_with_more_consumers_is_taken() -> None:
    def consumers(n: Tensor, rare: Tensor, common: Tensor) -> list[Tensor]:
        return [programs.divide(n, rare), programs.divide(n, common), programs.divide(n, common)]

    captured = fuse(consumers, S, torch.tensor(0.07))
    assert captured.rules == ["add_norm_fp8_out"]
    assert "scale_factor=arg4_1" in captured.after[0]
    assert captured.after[0].count("= clamp_min(") == 1


def test_folded_sums_quantise_too() -> None:
    bias = tensors(HIDDEN, count=1)[0]

    def program(x: Tensor, residual: Tensor, scale: Tensor) -> Any:
        total = residual + (programs.reduce(x) + bias)
        return programs.divide(NORM(total), scale), total

    assert capture(program, *tensors(2, 8, HIDDEN), S).rules == ["folded_add_norm_fp8"]


NORM = NORMS["functional"]()


def test_number_that_became_an_input_is_named_in_the_reason() -> None:
    def quantise(n: Tensor) -> Tensor:
        rows = n.float().abs().amax(-1, keepdim=True) / MAX
        return (n.float() / rows).clamp(-448.0, 448.0).to(FLOAT8)

    (site,) = fuse(quantise, dynamic=True).sites
    assert site.left is not None
    assert site.left.code == "quant_scale"
    assert "set torch._dynamo.config.specialize_float" in site.left.text


@pytest.mark.skipif(TORCH < "2.15", reason="such numbers stay numbers")
def test_bound_that_became_an_input_is_named_in_the_reason() -> None:
    (site,) = fuse(programs.divide, S, dynamic=True).sites
    assert site.left is not None
    assert site.left.code == "quant_form"
    assert "set torch._dynamo.config.specialize_float" in site.left.text


@pytest.mark.parametrize("bound", [448.0, 240.0])
def test_bounds_that_are_tensors_are_looked_into(bound: float) -> None:
    def quantise(n: Tensor, s: Tensor) -> Tensor:
        low, high = torch.full((), -bound), torch.full((), bound)
        return torch.clamp(n.float() / s, low, high).to(FLOAT8)

    (site,) = fuse(quantise, S).sites
    if bound == MAX:
        assert site.rule == "add_norm_fp8"
    else:
        assert "clamps to -240.0 and 240.0; the kernel to 448.0" in why(site).text


def test_bound_that_is_an_input_is_refused() -> None:
    def quantise(n: Tensor, s: Tensor, bound: Tensor) -> Tensor:
        return torch.clamp(n.float() / s, -bound, bound).to(FLOAT8)

    (site,) = fuse(quantise, S, torch.tensor(448.0)).sites
    assert "clamps to neg and arg" in why(site).text


def test_switched_off() -> None:
    captured = fuse(programs.rows, config=FusionConfig(fuse_quantisation=False))
    assert captured.rules == ["add_norm"]
    assert captured.sites[0].left is None


def round_first(n: Tensor, s: Tensor) -> Tensor:
    return torch.round(n.float() / s).clamp(-MAX, MAX).to(FLOAT8)


def other_bounds(n: Tensor, s: Tensor) -> Tensor:
    return (n.float() / s).clamp(-240, 240).to(FLOAT8)


def other_type(n: Tensor, s: Tensor) -> Tensor:
    return (n.float() / s).to(torch.float8_e5m2)


def whole_tensor(n: Tensor) -> Tensor:
    return programs.divide(n, n.float().abs().amax() / MAX)


def square_of_rows(n: Tensor) -> Tensor:
    return programs.divide(n, n.float().square().amax(-1, keepdim=True) / MAX)


def rows_of_half_the_range(n: Tensor) -> Tensor:
    return programs.divide(n, n.float().abs().amax(-1, keepdim=True) / 240.0)


def rows_with_large_floor(n: Tensor) -> Tensor:
    return programs.divide(n, (n.float().abs().amax(-1, keepdim=True) / MAX).clamp(min=0.01))


def columns(n: Tensor) -> Tensor:
    return programs.divide(n, n.float().abs().amax(-2, keepdim=True) / MAX)


def per_column(n: Tensor, s: Tensor) -> Tensor:
    return programs.divide(n, s)


def own_with_scale_of_the_norm(n: Tensor) -> Any:
    return custom_ops.scaled_fp8_quant(n, n.float().abs().max().reshape(1) / MAX)[0]


REFUSED: dict[str, tuple[Any, tuple[Tensor, ...], str, str]] = {
    "rounded first": (round_first, (S,), "quant_form", "no known form"),
    "other bounds": (other_bounds, (S,), "quant_form", "clamps to -240.0 and 240.0"),
    "other type": (other_type, (S,), "quant_form", "torch.float8_e5m2; the kernel writes torch.float8_e4m3fn"),
    "scale of the whole tensor": (whole_tensor, (), "quant_scale_depends", "depends on an all-reduce"),
    "scale of the whole tensor, own op": (own_with_scale_of_the_norm, (), "quant_scale_depends", "depends on"),
    "scale of squares": (square_of_rows, (), "quant_scale", "not that of each row in a known form"),
    "rows up to 240": (rows_of_half_the_range, (), "quant_scale", "not that of each row in a known form"),
    "rows with a large floor": (rows_with_large_floor, (), "quant_scale", "not that of each row in a known form"),
    "scale of columns": (columns, (), "quant_scale", "not that of each row in a known form"),
    "scale per column": (per_column, (torch.ones(HIDDEN),), "quant_scale", r"shape \[64\]"),
    "scale of zero": (
        lambda n: (n.float() * float("inf")).clamp(-MAX, MAX).to(FLOAT8),
        (),
        "quant_scale",
        "scale is inf",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_left_alone_with_a_reason(name: str) -> None:
    quantise, scales, code, text = REFUSED[name]
    captured = fuse(quantise, *scales)
    (site,) = captured.sites
    found = why(site)
    assert found.code == code
    assert re.search(text, found.text), found.text
    assert site.missed
    assert str(found) in str(site)
    assert code in fusion_passes.reporting.summary(captured.sites)
    assert "float8" in captured.after[0], "what quantises is still there"


@pytest.mark.parametrize(
    ("quantise", "shape", "dtype", "text"),
    [
        (custom_ops.mxfp8_quant, (4, 96 + 32), torch.bfloat16, None),
        (lambda n: custom_ops.scaled_fp8_quant(n, group_size=16), (4, HIDDEN), torch.bfloat16, None),
        (custom_ops.mxfp8_quant, (4, 64), torch.float32, None),
    ],
    ids=["128 columns", "groups of 16", "float32"],
)
def test_other_sizes_and_types(quantise: Any, shape: tuple[int, ...], dtype: torch.dtype, text: str | None) -> None:
    captured = fuse(quantise, shape=shape, dtype=dtype)
    assert captured.sites[0].fused
    assert captured.sites[0].left is None


def test_scale_of_rows_that_divides_columns_is_left_alone() -> None:
    """As many rows as columns: without a last dimension of one, the scale of row 3 divides column 3."""

    def columns(n: Tensor) -> Tensor:
        return programs.divide(n, n.float().abs().amax(-1) / 448.0)

    captured = fuse(columns, shape=(HIDDEN, HIDDEN))
    assert why(captured.sites[0]).code == "quant_scale"
    assert fuse(programs.rows, shape=(HIDDEN, HIDDEN)).rules == ["add_norm_fp8_token"]


def test_scale_that_adds_a_dimension_is_left_alone() -> None:
    captured = fuse(programs.divide, S.reshape(1, 1, 1), shape=(8, HIDDEN))
    assert why(captured.sites[0]).code == "quant_form"
    assert captured.result[0].shape == (1, 8, HIDDEN)
    assert fuse(programs.divide, S.reshape(1, 1), shape=(8, HIDDEN)).rules == ["add_norm_fp8"]


def test_norm_in_float32_is_rounded_to_be_quantised_and_left_alone_otherwise() -> None:
    weight = NORM.weight.detach()

    def program(x: Tensor, residual: Tensor, scale: Tensor, quantise: bool) -> Any:
        total = residual + programs.reduce(x)
        normed = torch.nn.functional.rms_norm(total.float(), (HIDDEN,), weight.float(), 1e-5)
        return programs.divide(normed, scale) if quantise else normed, total

    inputs = tensors(2, 8, HIDDEN)
    assert capture(program, *inputs, S, True).rules == ["add_norm_fp8"]
    assert capture(program, *inputs, S, True, config=FusionConfig(exact_rounding=True)).rules == ["quant_rounding"]
    (site,) = capture(program, *inputs, S, False).sites
    assert site.reason is not None
    assert site.reason.code == "norm_not_recognised"
    assert "leaves the norm in float32" in site.reason.text


def test_format_that_the_device_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Environment, "quantisation_refusal", lambda self, device, quantisation: f"no {quantisation.format.title} here"
    )
    captured = fuse(SPELLINGS["own NVFP4"].quantise, torch.tensor(300.0))
    (site,) = captured.sites
    assert site.rule == "add_norm"
    assert str(site.left) == "quant_device: no NVFP4 here"
    assert not site.missed, "nothing that the user could mend"


def test_strict_raises_for_a_quantisation_that_was_missed() -> None:
    with pytest.raises(Exception, match=r"quant_form: .* clamps to -240"):
        fuse(other_bounds, S, config=FusionConfig(strict=True))


def test_rules_are_norms_times_formats() -> None:
    assert len({rule.name for rule in rules.RULES}) == len(rules.RULES) == 4 * (1 + 2 * len(custom_ops.FORMATS))
    assert rules.pick(residual=True, format="fp8", norm_out=True).pattern_code == 4
    assert rules.pick(residual=False, format="nvfp4", norm_out=False).pattern_code == 3
    codes = {(rule.format, rule.norm_out): rule.pattern_code for rule in rules.RULES}
    assert codes == {
        (None, True): 1, ("fp8", False): 2, ("fp8", True): 4, ("nvfp4", False): 3, ("nvfp4", True): 5,
        ("fp8_group", False): 8, ("fp8_group", True): 9, ("fp8_token", False): 10, ("fp8_token", True): 11,
        ("mxfp8", False): 13, ("mxfp8", True): 14,
    }  # fmt: skip
