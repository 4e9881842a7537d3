"""The reference against float64, and its roundings one by one."""

from __future__ import annotations

import pytest
import torch

from custom_ops import reference
from tests.support.ulp import ulp

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_is_within_half_an_ulp_of_float64(dtype: torch.dtype) -> None:
    x, gamma = torch.randn(64, 2880).to(dtype), torch.randn(2880).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, True) + 1e-6) * (1 + gamma.double())
    error = (reference.rms_norm(x, gamma, 1e-6, weight_bias=1.0).double() - exact).abs()
    # Half an ulp for the one rounding, and what float32 adds before it.
    slack = 0.5 if dtype != torch.float32 else 4
    assert (error <= (slack + 0.01) * ulp(exact, dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rounds_once_like_torch(dtype: torch.dtype) -> None:
    x, gamma = torch.randn(64, 4096).to(dtype), torch.randn(4096).to(dtype)
    theirs = torch.nn.functional.rms_norm(x, (4096,), gamma, 1e-6)
    ours = reference.rms_norm(x, gamma, 1e-6)
    assert (ours != theirs).float().mean() < 1e-3 or dtype == torch.float32
    torch.testing.assert_close(ours, theirs)


def test_no_gamma_is_a_weight_of_one() -> None:
    x = torch.randn(4, 64).bfloat16()
    assert torch.equal(reference.rms_norm(x, None, 1e-6), reference.rms_norm(x, torch.ones(64).bfloat16(), 1e-6))


def test_weight_bias_is_added_in_float32() -> None:
    x, gamma = torch.randn(4, 64).bfloat16(), torch.full((64,), 1e-3).bfloat16()
    lost = reference.rms_norm(x, gamma + 1, 1e-6)
    kept = reference.rms_norm(x.float(), gamma.float() + 1, 1e-6).bfloat16()
    assert torch.equal(reference.rms_norm(x, gamma, 1e-6, weight_bias=1.0), kept)
    assert not torch.equal(lost, kept)


def test_sum_over_ranks_rounds_once_or_after_every_addition() -> None:
    parts = [
        torch.tensor([256.0, 1.0]).bfloat16(),
        torch.tensor([1.0, 1.0]).bfloat16(),
        torch.tensor([1.0, 1.0]).bfloat16(),
    ]
    assert reference.sum_ranks(parts).tolist() == [258.0, 3.0]
    assert reference.sum_ranks(parts, fp32_acc=False).tolist() == [256.0, 3.0]


def test_negative_zeros_come_out_positive() -> None:
    zero = torch.tensor([-0.0]).bfloat16()
    assert not torch.signbit(reference.sum_ranks([zero, zero])).any()
    assert not torch.signbit(reference.add_residual(reference.sum_ranks([zero, zero]), zero)).any()


def test_residual_is_added_to_the_rounded_sum() -> None:
    reduced = reference.sum_ranks([torch.tensor([75000.0]).bfloat16(), torch.tensor([100.0]).bfloat16()])
    residual = torch.tensor([-75000.0]).bfloat16()
    assert reference.add_residual(reduced, residual).item() == (reduced.float() + residual.float()).item()
    assert torch.equal(reference.add_residual(reduced, None), reduced)
