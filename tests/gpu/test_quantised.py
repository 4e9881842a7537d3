"""The quantising patterns of the op on real GPUs, and quantised models compiled with the pass."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
import fusion_passes
from custom_ops import domain, pattern_codes, reference_quant
from fusion_passes import FusionConfig, compat
from fusion_passes.bench.float8_linear import quantise_linears
from fusion_passes.bench.stack import Shape, Stack
from tests.support import gpu
from tests.support.gpu import EPS, Case, case
from tests.support.quantised import CASES, Outputs, quantisation_of
from tests.support.ranks import Ranks

HIDDEN = (2880, 4096, 7168)
SCALE = 0.037


def call(name: str, one: Case, norm_out: bool) -> tuple[Tensor, Tensor, Outputs]:
    """(new residual, norm, values and scales) that the op writes."""
    quantisation, outputs = quantisation_of(name), Outputs(name, tuple(one.x.shape), "cuda")
    norm, total = one.outputs()
    gpu.OP(
        one.x, one.residual, one.gamma, EPS, dist.get_world_size(), True, True, 0,
        pattern_codes.find(quantisation.format.name, norm_out).code,
        scale_factor=torch.full((1,), SCALE, device="cuda") if quantisation.format.takes_scale else None,
        norm_out=norm if norm_out else None, residual_out=total, **outputs.tensors, **CASES[name],
    )  # fmt: skip
    return total, norm, outputs


def check(name: str, one: Case) -> None:
    total, norm, outputs = call(name, one, norm_out=True)
    one.check(norm, total)
    scale = torch.tensor(SCALE, device="cuda")
    rows = norm.view(-1, norm.shape[-1])
    expected = reference_quant.quantise(rows, quantisation_of(name), scale) if len(rows) else None
    for written in (outputs, call(name, one, norm_out=False)[2]):
        if expected is not None:
            written.check(*expected)


def eager(name: str, hidden: int) -> dict[str, int]:
    for tokens in (0, 1, 2, 3, 16, 17, 128, 129, 1024, gpu.limit(hidden), gpu.limit(hidden) + 1):
        check(name, case(tokens, hidden, seed=tokens))
    check(name, case(2, 3, hidden))
    return gpu.ran()


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("name", CASES)
def test_eager(gpus: Ranks, name: str, hidden: int) -> None:
    quantisation = quantisation_of(name)
    refusal = domain.shape_refusal(hidden, torch.bfloat16, gpus.world_size, quantisation)
    if refusal:
        pytest.skip(refusal)
    lacking = domain.device_refusal(torch.cuda.get_device_capability(), quantisation)
    for summary in gpus.run(eager, name, hidden):
        if lacking:
            assert set(summary) == {lacking}, "what the kernel would fill with zeros runs without it"
        else:
            assert summary["one_shot, early trigger"] > 0
            assert summary["message above the limit of this device and world size"] == 2


def captured(name: str) -> None:
    for tokens in (1, 17, 129):
        one = case(tokens, 4096, seed=tokens)
        call(name, one, norm_out=True)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            total, norm, outputs = call(name, one, norm_out=True)
        for seed in (1, 2):
            fresh = case(tokens, 4096, seed=seed)
            for mine, new in ((one.x, fresh.x), (one.residual, fresh.residual), (one.gamma, fresh.gamma)):
                mine.copy_(new)
            graph.replay()
            one.check(norm, total)
            scale = torch.tensor(SCALE, device="cuda")
            outputs.check(*reference_quant.quantise(norm, quantisation_of(name), scale))


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("nvfp4") and not name.endswith("96")])
def test_cuda_graph(gpus: Ranks, name: str) -> None:
    gpus.run(captured, name)


def model(per_token: bool, batch: int) -> tuple[Counter[str | None], float, float]:
    """(rules, difference of fused to unfused, of unfused to eager), rms, as a share of the deviation."""
    shape = Shape(layers=3, context=16)
    torch.manual_seed(dist.get_rank())
    with torch.device("cuda"), torch.inference_mode(), compat.without_caches():
        stack = Stack(shape, batch, dist.get_world_size()).to(torch.bfloat16)
        quantise_linears(stack, per_token)
        torch.manual_seed(1)
        x = torch.randn(batch, shape.hidden).to(torch.bfloat16)
        angles = torch.rand(shape.hidden // shape.heads // 2)
        eager = stack(x, angles)
        results = []
        for config in (FusionConfig(), FusionConfig(fuse_allreduce_rms=False)):
            torch._dynamo.reset()
            fusion_passes.reset_report()
            results.append(torch.compile(stack, fullgraph=True, options=fusion_passes.options(config))(x, angles))
            if config.fuse_allreduce_rms:
                rules = Counter(site.rule for site in fusion_passes.report())
    spread = eager.float().std()

    def apart(a: Tensor, b: Tensor) -> float:
        return ((a - b).float().square().mean().sqrt() / spread).item()

    return rules, apart(results[0], results[1]), apart(results[1], eager)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("per_token", [False, True], ids=["static", "per token"])
def test_float8_llama(gpus: Ranks, per_token: bool, batch: int) -> None:
    name = "fp8_token" if per_token else "fp8"
    for rules, to_unfused, unfused_to_eager in gpus.run(model, per_token, batch, timeout=240):
        assert rules == {f"add_norm_{name}": 5, "add_norm": 1}
        assert to_unfused < max(2 * unfused_to_eager, 0.02)


def test_counters_name_the_pattern(gpus: Ranks) -> None:
    for codes in gpus.run(count):
        assert codes == {11: 1, 10: 1}


def count() -> dict[int, int]:
    custom_ops.reset_launches()
    check("fp8_token", case(4, 4096))
    return {launch.pattern_code: times for launch, times in custom_ops.launches().items()}
