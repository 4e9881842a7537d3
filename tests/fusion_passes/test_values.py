"""Values of every form between two real ranks: fused against eager and against float64, within docs/numerics.md."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
from tests.support.capture import capture
from tests.support.programs import EPS, NORMS, ROUNDS_BEFORE_WEIGHT, AddNorm, HandWritten, JustNorm, reduce, tensors
from tests.support.ranks import Ranks
from tests.support.ulp import distance

HIDDEN = 960
ROWS = 64


@dataclass(frozen=True)
class Bound:
    """Largest distances in ulp of the activation type, as docs/numerics.md states them.

    Attributes:
        to_eager: fused against eager.
        to_exact: fused against the float64 norm of the rounded residual.
    """

    to_eager: float
    to_exact: float


BOUNDS = {
    (False, torch.bfloat16): Bound(1.0, 0.51),
    (False, torch.float16): Bound(1.0, 0.51),
    (False, torch.float32): Bound(6.0, 4.0),
    (True, torch.bfloat16): Bound(2.0, 0.51),
    (True, torch.float16): Bound(2.0, 0.51),
    (True, torch.float32): Bound(6.0, 4.0),
}
"""Bounds by (the form rounds before its weight, type)."""


def exact_norm(norm: HandWritten, total: Tensor) -> Tensor:
    """The norm in float64."""
    x = total.double()
    weight = {"Gemma": 1 + norm.weight.double(), "NoWeight": torch.ones(())}.get(
        type(norm).__name__, norm.weight.double()
    )
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def compare(name: str, dtype: torch.dtype, with_residual: bool) -> tuple[float, float, float]:
    """(fused to eager, fused to exact, eager to exact) in ulp, after checking that it fused and the residual is equal."""
    norm = NORMS[name](HIDDEN, dtype)
    (x,) = tensors(4, ROWS // 4, HIDDEN, dtype=dtype, count=1, seed=10 + dist.get_rank())
    residual = tensors(4, ROWS // 4, HIDDEN, dtype=dtype, count=1, seed=3)
    module, inputs = (AddNorm(norm), [x, *residual]) if with_residual else (JustNorm(norm), [x])
    with torch.no_grad():
        normed_eager, total_eager = module(*inputs)
    captured = capture(module, *inputs)
    assert captured.rules == ["add_norm" if with_residual else "norm"]
    assert sum(custom_ops.launches().values()) == 1
    normed, total = captured.result
    assert torch.equal(total, total_eager), "the residual equals all-reduce and add bit for bit"
    exact = exact_norm(norm, total).detach()
    return (
        distance(normed, normed_eager, exact, dtype),
        distance(normed, exact, exact, dtype),
        distance(normed_eager, exact, exact, dtype),
    )


@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "no_residual"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_form(ranks: Ranks, name: str, dtype: torch.dtype, with_residual: bool) -> None:
    bound = BOUNDS[name in ROUNDS_BEFORE_WEIGHT, dtype]
    for to_eager, to_exact, _ in ranks.run(compare, name, dtype, with_residual):
        assert to_eager <= bound.to_eager
        assert to_exact <= bound.to_exact


def small_weights() -> None:
    """A weight stored less one, of about 1e-3, keeps its digits: it is added to one in float32."""
    norm = NORMS["gemma"](HIDDEN, torch.bfloat16)
    norm.weight.data = 1e-3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    (x,) = tensors(ROWS, HIDDEN, count=1, seed=dist.get_rank())
    (residual,) = tensors(ROWS, HIDDEN, count=1, seed=5)
    normed, total = capture(AddNorm(norm), x, residual).result
    exact = exact_norm(norm, total).detach()
    assert distance(normed, exact, exact, torch.bfloat16) <= 0.51


def test_weights_near_one_keep_their_digits(ranks: Ranks) -> None:
    ranks.run(small_weights)


def outliers() -> None:
    """Residuals near 75,000 and activations of 1e5: float32 accumulation, one rounding, as eager."""
    norm = NORMS["functional"](HIDDEN, torch.bfloat16)
    (x,) = tensors(ROWS, HIDDEN, count=1, seed=dist.get_rank())
    (residual,) = tensors(ROWS, HIDDEN, count=1, seed=5)
    x[:, 3], residual[:, 3], residual[:, 7] = 1e5, -75000.0, 75000.0
    normed, total = capture(AddNorm(norm), x, residual).result
    with torch.no_grad():
        assert torch.equal(total, residual + reduce(x))
    exact = exact_norm(norm, total).detach()
    assert distance(normed, exact, exact, torch.bfloat16) <= 0.51


def test_outliers(ranks: Ranks) -> None:
    ranks.run(outliers)


def layers(dynamic: bool) -> list[tuple[float, float]]:
    """A stack of four norms, for several sizes: errors (fused, eager) against the same stack in float64, rms."""
    norms = [NORMS[name](HIDDEN) for name in ("hugging_face_llama", "gemma", "functional", "gpt_oss")]
    generator = torch.Generator().manual_seed(1)
    weights = [(torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5).bfloat16() for _ in norms]

    def stack(x: Tensor, exact: bool = False) -> Tensor:
        def norm(index: int, residual: Tensor) -> Tensor:
            return exact_norm(norms[index], residual) if exact else norms[index](residual)

        residual = reduce(x)
        normed = norm(0, residual)
        for index in (1, 2, 3):
            residual = residual + reduce(normed @ weights[index].to(x.dtype))
            normed = norm(index, residual)
        return torch.cat([normed, residual])

    errors = []
    for rows in (1, 2, 5):
        (x,) = tensors(2, rows, HIDDEN, count=1, seed=dist.get_rank())
        captured = capture(stack, x, dynamic=dynamic)
        assert captured.rules == ["norm", "add_norm", "add_norm", "add_norm"]
        with torch.no_grad():
            exact, eager = stack(x.double(), exact=True), stack(x)
        errors.append(tuple((out.double() - exact).square().mean().sqrt().item() for out in (captured.result, eager)))
    return errors


@pytest.mark.parametrize("dynamic", [False, True])
def test_stack_of_layers_is_as_exact_as_eager_mode(ranks: Ranks, dynamic: bool) -> None:
    for errors in ranks.run(layers, dynamic):
        for fused, eager in errors:
            assert fused < 1.1 * eager
            assert 0 < fused < 0.05
