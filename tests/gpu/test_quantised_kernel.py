"""The kernel's quantising patterns against their arithmetic, bit for bit; both ranks on one GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from custom_ops import (
    domain,
    formats,
    machine,
    pattern_codes,
    quant_arguments,
    reference,
    reference_quant,
)
from custom_ops.flashinfer_adapter import KernelCall
from tests.support.one_gpu import RANKS, OneGpu
from tests.support.quantised import CASES, Outputs, quantisation_of, raw

HIDDEN = (1792, 2880, 3584, 5376, 7168)
TOKENS = (1, 5, 32, 127, 128, 129)
SCALES = (0.05, 0.037, 1.0, 0.0123, 0.0, math.inf, math.nan, -0.5)
EPS = 1e-6


@pytest.fixture(scope="module")
def pairs() -> dict[torch.dtype, OneGpu]:
    """Two ranks on one GPU for each class of types."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if refusal := machine.refusal(machine.default_device()):
        pytest.skip(refusal)
    small, large = OneGpu(8 << 20, torch.float16), OneGpu(8 << 20, torch.float32)
    return {torch.bfloat16: small, torch.float16: small, torch.float32: large}


def inputs(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """(contributions, residual, gamma), with a row of zeros, a NaN, an infinity and an outlier where there is room."""
    generator = torch.Generator("cuda").manual_seed(tokens * hidden)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    contributions, residual, gamma = (
        [random(tokens, hidden) for _ in range(RANKS)],
        random(tokens, hidden),
        random(hidden),
    )
    if tokens > 4:
        for tensor in (*contributions, residual):
            tensor[1] = 0
        residual[2, 7], residual[3, 5], contributions[0][4, 0] = 3000, math.nan, math.inf
    return contributions, residual, gamma


def calls(
    pair: OneGpu, case: str, tokens: int, hidden: int, dtype: torch.dtype, norm_out: bool, one_shot: bool, scale: float
) -> tuple[list[KernelCall], list[Outputs]]:
    """What each rank launched, and what it wrote."""
    quantisation = quantisation_of(case)
    contributions, residual, gamma = inputs(tokens, hidden, dtype)
    made, outputs = [], []
    for rank in range(RANKS):
        own = Outputs(case, (tokens, hidden), "cuda")
        factor = torch.tensor([scale], device="cuda") if quantisation.format.takes_scale else None
        quantised = quant_arguments.check(
            quantisation, residual, own.tensors["quant_out"], own.tensors.get("scale_out"), factor
        )
        call = KernelCall(
            pattern_codes.find(quantisation.format.name, norm_out).code,
            contributions[rank],
            one_shot=one_shot,
            launch_with_pdl=False,
            completion_at_end=True,
            fp32_acc=dtype != torch.float32,
            residual=residual,
            residual_out=torch.empty_like(residual),
            norm_out=torch.empty_like(residual) if norm_out else None,
            gamma=gamma,
            eps=EPS,
            quantised=quantised,
        )
        made.append(call)
        outputs.append(own)
    pair.run(made)
    return made, outputs


def check(pair: OneGpu, case: str, tokens: int, hidden: int, dtype: torch.dtype, one_shot: bool, scale: float) -> None:
    quantisation = quantisation_of(case)
    launched, outputs = calls(pair, case, tokens, hidden, dtype, True, one_shot, scale)
    without_norm, others = calls(pair, case, tokens, hidden, dtype, False, one_shot, scale)
    norm = launched[0].norm_out
    assert norm is not None
    quantised = launched[0].quantised
    assert quantised is not None
    values, scales = reference_quant.quantise(norm, quantisation, quantised.scale)
    for own in (*outputs, *others):
        own.check(values, scales)
    for call in (*launched, *without_norm):
        assert call.residual_out is not None
        reduced = reference.sum_ranks([one.allreduce_in for one in launched])
        assert torch.equal(raw_bits(call.residual_out), raw_bits(reference.add_residual(reduced, call.residual)))


def raw_bits(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor).view(torch.uint8)


SERVED = [case for case in CASES if not case.startswith("nvfp4")]


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("case", SERVED)
def test_every_size(pairs: dict[torch.dtype, OneGpu], case: str, hidden: int) -> None:
    if refusal := domain.shape_refusal(hidden, torch.bfloat16, RANKS, quantisation_of(case)):
        pytest.skip(refusal)
    for tokens in TOKENS:
        for one_shot in (True, False) if tokens > RANKS else (True,):
            check(pairs[torch.bfloat16], case, tokens, hidden, torch.bfloat16, one_shot, 0.037)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", SERVED)
def test_other_types(pairs: dict[torch.dtype, OneGpu], case: str, dtype: torch.dtype) -> None:
    for hidden in (1536, 4032):
        if domain.shape_refusal(hidden, dtype, RANKS, quantisation_of(case)) is None:
            check(pairs[dtype], case, 33, hidden, dtype, True, 0.037)


@pytest.mark.parametrize("scale", SCALES)
def test_static_scales(pairs: dict[torch.dtype, OneGpu], scale: float) -> None:
    check(pairs[torch.bfloat16], "fp8", 33, 4096, torch.bfloat16, True, scale)


def test_many_static_scales(pairs: dict[torch.dtype, OneGpu]) -> None:
    """Ties are frequent for scales that are made of short numbers: the reciprocal decides them."""
    for step in range(3, 200):
        check(pairs[torch.bfloat16], "fp8", 8, 4096, torch.bfloat16, True, step / 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("norm_out", [True, False])
@pytest.mark.parametrize("case", ["fp8", "fp8_token"])
def test_unfused_kernel_quantises_alike(pairs: object, case: str, norm_out: bool, dtype: torch.dtype) -> None:
    from custom_ops import norm_kernel

    for tokens, hidden in ((1, 4096), (33, 2880), (5, 1001)):
        contributions, residual, gamma = inputs(tokens, hidden, dtype)
        own = Outputs(case, (tokens, hidden), "cuda")
        scale = torch.tensor([0.037], device="cuda") if case == "fp8" else None
        quantised = quant_arguments.check(
            quantisation_of(case), residual, own.tensors["quant_out"], own.tensors.get("scale_out"), scale
        )
        totals, norms = [], []
        for wanted in (None, quantised):
            totals.append(torch.empty_like(residual))
            norms.append(torch.empty_like(residual) if norm_out or wanted is None else None)
            norm_kernel.add_rms_norm(contributions[0], residual, gamma, EPS, 0.0, totals[-1], norms[-1], wanted)
        assert torch.equal(raw_bits(totals[0]), raw_bits(totals[1]))
        # In float32 two compilations of a norm may differ in its last bit; that shows only where the norm is written.
        norm = norms[1] if norm_out else norms[0]
        assert norm is not None
        if norm_out or dtype != torch.float32:
            own.check(*reference_quant.quantise(norm, quantised.quantisation, scale))


def test_nvfp4_is_refused_before_blackwell(pairs: object) -> None:
    capability = machine.capability(machine.default_device())
    refusal = domain.device_refusal(capability, formats.choose("nvfp4"))
    assert (refusal is None) == (capability is not None and capability >= (10, 0))


def test_reciprocal_is_the_hardware_s(pairs: object) -> None:
    """One number in eight is not rounded correctly; the reference on CPUs rounds it."""
    every = (torch.arange(2**23, device="cuda", dtype=torch.int32) | 0x3F800000).view(torch.float32)
    apart = reference_quant.reciprocal(every).view(torch.int32) - (1 / every.double()).float().view(torch.int32)
    assert apart.abs().max() == 1
    assert 0.1 < (apart != 0).float().mean() < 0.15


def test_padding_of_packed_scales_of_one_token(pairs: dict[torch.dtype, OneGpu]) -> None:
    _, outputs = calls(pairs[torch.bfloat16], "fp8_group, 128", 1, 1792, torch.bfloat16, True, True, 1.0)
    scales = outputs[0].tensors["scale_out"]
    assert (scales.shape, scales.stride()) == ((1, 4), (1, 4))
    assert raw(scales.contiguous().view(torch.uint8)).view(-1)[14:].tolist() == [0, 0]
