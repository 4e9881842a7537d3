"""Quantised models between real ranks, and the quantised layers of torchao and Hugging Face behind a norm."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import custom_ops
from fusion_passes import FusionConfig
from fusion_passes.bench.float8_linear import quantise_linears
from fusion_passes.bench.stack import Shape, Stack
from tests.support.capture import Captured, capture
from tests.support.programs import Functional, reduce, tensors
from tests.support.ranks import Ranks

SINCE_2_13 = TorchVersion(torch.__version__) >= "2.13"
scales_of_rows = pytest.mark.skipif(
    not SINCE_2_13, reason="CPUs multiply FP8 with a scale for each row from torch 2.13 on"
)
SHAPE = Shape(hidden=256, intermediate=512, heads=8, kv_heads=4, layers=3, context=16)
HIDDEN = 64


def stack(per_token: bool) -> tuple[Stack, Tensor, Tensor]:
    """A Llama-shaped decoding step in FP8, this rank's share of it, and its inputs."""
    torch.manual_seed(dist.get_rank())
    model = Stack(SHAPE, 4, dist.get_world_size()).to(torch.bfloat16)
    quantise_linears(model, per_token, input_scale=0.015)
    (x,) = tensors(4, SHAPE.hidden, count=1)
    return model, x, torch.rand(SHAPE.hidden // SHAPE.heads // 2, generator=torch.Generator().manual_seed(1))


def outputs(per_token: bool) -> tuple[Counter[str | None], Counter[str | None], list[float], int]:
    """(rules of all sites, of norms alone, differences to eager mode: fused, norms alone, unfused; calls)."""
    model, x, angles = stack(per_token)
    # The cache takes this step's keys in place; each run writes the same ones.
    with torch.no_grad():
        eager = model(x, angles)
    custom_ops.reset_launches()
    runs = [
        capture(model, x, angles, config=config)
        for config in (
            FusionConfig(), FusionConfig(fuse_quantisation=False), FusionConfig(fuse_allreduce_rms=False),
        )
    ]  # fmt: skip
    everyone = [torch.empty_like(runs[0].result) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, runs[0].result.contiguous())
    assert torch.equal(*everyone), "ranks agree bit for bit"
    apart = [((run.result - eager).float().square().mean().sqrt() / eager.float().std()).item() for run in runs]
    rules = [Counter(site.rule for site in run.sites) for run in runs[:2]]
    return rules[0], rules[1], apart, sum(custom_ops.launches().values())


@pytest.mark.parametrize(
    "per_token", [pytest.param(False, id="static"), pytest.param(True, id="per token", marks=scales_of_rows)]
)
def test_float8_llama(ranks: Ranks, per_token: bool) -> None:
    """All sites but the last quantise: what follows the last norm is the caller's."""
    format = "fp8_token" if per_token else "fp8"
    sites = 2 * SHAPE.layers
    for rules, norms, (fused, only_norms, unfused), calls in ranks.run(outputs, per_token, timeout=300):
        assert rules == {f"add_norm_{format}": sites - 1, "add_norm": 1}
        # Torch 2.11 drops the cast of a norm that only a static quantisation takes.
        assert norms == {"add_norm": sites} if SINCE_2_13 else norms["add_norm"] == 1
        assert calls == sites + norms["add_norm"]
        # A value at a tie that falls to the other side is off by a code point, 1/16 of it, in every run.
        assert fused < max(2 * unfused, 0.02)
        assert only_norms < 0.02


def behind_norm(layers: nn.ModuleList) -> Callable[[Tensor, Tensor], Any]:
    """all-reduce, add, norm, and some layers that take the norm."""
    norm = Functional(HIDDEN)

    def program(x: Tensor, residual: Tensor) -> Any:
        total = residual + reduce(x)
        normed = norm(total)
        return [layer(normed) for layer in layers], total

    return program


def fused(layers: list[nn.Module], dynamic: bool = False) -> Captured:
    with torch.no_grad():
        return capture(behind_norm(nn.ModuleList(layers)), *tensors(2, 8, HIDDEN), dynamic=dynamic or None)


def torchao_linear(granularity: Any) -> nn.Module:
    """A layer of torchao's Float8DynamicActivationFloat8WeightConfig, whose handler refuses CPUs: made as that does."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor, QuantizeTensorToFloat8Kwargs

    layer = nn.Linear(HIDDEN, 32, bias=False, dtype=torch.bfloat16)
    kwargs = QuantizeTensorToFloat8Kwargs(granularity=granularity)
    made = Float8Tensor.from_hp(
        layer.weight.data, granularity=granularity, mm_config=Float8MMConfig(), act_quant_kwargs=kwargs
    )
    layer.weight = nn.Parameter(made, requires_grad=False)
    return layer


@scales_of_rows
@pytest.mark.usefixtures("fake_group")
def test_torchao_rows() -> None:
    from torchao.quantization import PerRow

    captured = fused([torchao_linear(PerRow()) for _ in range(3)])
    assert captured.rules == ["add_norm_fp8_token"]
    assert captured.before[0].count("= amax(") == 3
    assert captured.after[0].count("= _scaled_mm(") == 3
    assert "amax" not in captured.after[0]


@pytest.mark.usefixtures("fake_group")
def test_torchao_scale_of_the_whole_tensor_is_left_alone() -> None:
    from torchao.quantization import PerTensor

    (site,) = fused([torchao_linear(PerTensor())]).sites
    assert site.rule == "add_norm"
    assert site.left is not None
    assert site.left.code == "quant_scale_depends"


def compressed_tensors_linear() -> nn.Module:
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear

    layer = CompressedTensorsFP8Linear(HIDDEN, 32)
    layer.weight.data.copy_(torch.randn(32, HIDDEN).to(torch.float8_e4m3fn))
    layer.weight_scale.data.fill_(0.01)
    return layer.requires_grad_(False)


@scales_of_rows
@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compressed_tensors(dynamic: bool) -> None:
    with torch._dynamo.config.patch(specialize_float=True):
        captured = fused([compressed_tensors_linear() for _ in range(2)], dynamic)
    assert captured.rules == ["add_norm_fp8_token"]
    assert captured.before[0].count("= amax(") == 2
    assert "amax" not in captured.after[0]


@scales_of_rows
@pytest.mark.usefixtures("fake_group")
def test_dynamic_shapes_hide_the_largest_float8_number_of_hugging_face() -> None:
    """It is a global float, of which dynamic=True makes an input."""
    (site,) = fused([compressed_tensors_linear()], dynamic=True).sites
    assert site.rule == "add_norm"
    assert site.left is not None
    assert "set torch._dynamo.config.specialize_float" in site.left.text


@pytest.mark.usefixtures("fake_group")
def test_torchao_operator_with_a_static_scale() -> None:
    import torchao  # noqa: F401  registers the operator

    scale = torch.tensor(0.02)

    def program(x: Tensor, residual: Tensor, scale: Tensor) -> Any:
        total = residual + reduce(x)
        quantise = torch.ops.torchao.quantize_affine_float8_non_decomposed
        return quantise(NORM(total), scale, torch.float8_e4m3fn), total

    captured = capture(program, *tensors(2, 8, HIDDEN), scale)
    assert captured.rules == ["add_norm_fp8"]
    assert "torchao" not in captured.after[0]
    exact = capture(program, *tensors(2, 8, HIDDEN), scale, config=FusionConfig(exact_rounding=True))
    assert exact.rules == ["add_norm"]


NORM = Functional(HIDDEN)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("given", [True, False], ids=["calibrated", "without a global scale"])
def test_torchao_nvfp4(given: bool) -> None:
    """torchao's default for NVFP4 is one operator, whose kernel is for Blackwell; here it is traced."""
    from torchao.prototype.mx_formats import kernels

    class Cdiv:
        @staticmethod
        def cdiv(a: int, b: int) -> int:
            return -(-a // b)

    missing = not hasattr(kernels, "triton")
    if missing:  # its fake takes one function of Triton, which CPU builds of torch lack
        kernels.triton = Cdiv  # type: ignore[attr-defined]
    try:
        from fusion_passes import inspect_fusion

        def program(x: Tensor, residual: Tensor, scale: Tensor) -> Any:
            total = residual + reduce(x)
            rows = NORM(total).reshape(-1, HIDDEN)
            scales, values = kernels.mslk_quantize_nvfp4(rows, scale if given else None)
            return values.view(torch.float4_e2m1fn_x2), scales, total

        found = inspect_fusion(program, *tensors(2, 8, HIDDEN), torch.tensor(0.01), device="cpu")
    finally:
        if missing:
            del kernels.triton
    assert [site.rule for site in found.sites] == ["add_norm_nvfp4"]
    assert "mslk" not in found.after
    assert ("reciprocal" in found.after) is given


@pytest.mark.usefixtures("fake_group")
def test_torchao_mxfp8_in_plain_operators_is_left_alone_with_a_reason() -> None:
    from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

    def program(x: Tensor, residual: Tensor) -> Any:
        total = residual + reduce(x)
        scales, values = to_mx(NORM(total), torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        return values, scales.view(torch.uint8), total

    (site,) = capture(program, *tensors(2, 8, HIDDEN)).sites
    assert site.rule == "add_norm"
    assert site.left is not None
    assert site.left.code == "quant_form"


@pytest.mark.usefixtures("fake_group")
def test_import_of_this_package_does_not_need_torchao() -> None:
    import subprocess
    import sys

    code = "import sys, fusion_passes, custom_ops; assert 'torchao' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
