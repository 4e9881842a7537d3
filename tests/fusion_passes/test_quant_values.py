"""Values of every spelling between two real ranks: fused against eager, within docs/numerics.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
import fusion_passes
from fusion_passes import compat
from tests.support import codes
from tests.support.capture import capture
from tests.support.programs import tensors
from tests.support.quant_programs import SPELLINGS, Quantised, with_its_numbers
from tests.support.ranks import Ranks

HIDDEN = 960
ROWS = 128


def outputs(result: Any) -> tuple[Tensor, Tensor | None]:
    """(values, scales) of what a spelling returns."""
    return result if isinstance(result, tuple) else (result, None)


def compare(name: str, dtype: torch.dtype, dynamic: bool | None) -> tuple[float, int, float]:
    """(share of values that differ from eager mode, by how many code points at most, relative difference of scales)."""
    spelling = SPELLINGS[name]
    module = Quantised(spelling.quantise, HIDDEN, dtype)
    (x,) = tensors(4, ROWS // 4, HIDDEN, dtype=dtype, count=1, seed=10 + dist.get_rank())
    (residual,) = tensors(4, ROWS // 4, HIDDEN, dtype=dtype, count=1, seed=3)
    with torch.no_grad():
        expected, total_expected = module(x, residual, *spelling.scales)
    with with_its_numbers():
        captured = capture(module, x, residual, *spelling.scales, dynamic=dynamic)
    assert captured.rules == [f"add_norm_{spelling.format}"]
    assert sum(custom_ops.launches().values()) == 1
    result, total = captured.result
    assert torch.equal(total, total_expected), "the residual equals all-reduce and add bit for bit"
    (values, scales), (values_expected, scales_expected) = outputs(result), outputs(expected)
    assert (values.shape, values.dtype) == (values_expected.shape, values_expected.dtype)
    share, most = codes.distance(values, values_expected)
    return share, most, 0.0 if scales is None else difference(scales, scales_expected)


def difference(scales: Tensor, expected: Tensor | None) -> float:
    """Largest relative difference of float32 scales; of others, whether they differ, where rows are."""
    assert expected is not None
    assert (scales.shape, scales.stride(), scales.dtype) == (expected.shape, expected.stride(), expected.dtype)
    if scales.dtype == torch.float32:
        return ((scales - expected).abs() / expected).max().item()
    if scales.dtype == torch.int32:
        return float(not torch.equal(scales, expected))
    # Rows fill whole tiles, so the only padding is in columns, and that is zero in both or not compared.
    mine, its = scales.view(torch.uint8), expected.view(torch.uint8)
    return float((mine != its)[its != 0].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(ranks: Ranks, name: str, dtype: torch.dtype) -> None:
    spelling = SPELLINGS[name]
    if spelling.format == "nvfp4" and dtype == torch.float32:
        pytest.skip("NVFP4 is made of 16-bit activations")
    for share, most, apart in ranks.run(compare, name, dtype, None):
        assert share <= max(spelling.share, 2e-4 if dtype == torch.float32 else 0.0)
        assert most <= 1
        assert apart <= (2**-8 if name == "torchao rows" else 2e-7)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling_with_dynamic_shapes(ranks: Ranks, name: str) -> None:
    for share, most, _ in ranks.run(compare, name, torch.bfloat16, True):
        assert share <= SPELLINGS[name].share
        assert most <= 1


def compiled(name: str, dynamic: bool) -> tuple[float, int]:
    """(share of values that differ from eager mode, by how many code points at most), with the code Inductor writes."""
    spelling = SPELLINGS[name]
    module = Quantised(spelling.quantise, HIDDEN)
    with torch.no_grad(), compat.without_caches(), fusion_passes.enabled(), with_its_numbers():
        fn = torch.compile(module, fullgraph=True, dynamic=dynamic)
        found = []
        for rows in (5, 8):
            (x,) = tensors(2, rows, HIDDEN, count=1, seed=10 + dist.get_rank())
            (residual,) = tensors(2, rows, HIDDEN, count=1, seed=3)
            result, total = fn(x, residual, *spelling.scales)
            expected, total_expected = module(x, residual, *spelling.scales)
            assert torch.equal(total, total_expected)
            found.append(codes.distance(outputs(result)[0], outputs(expected)[0]))
    assert {site.rule for site in fusion_passes.report()} == {f"add_norm_{spelling.format}"}
    return max(share for share, _ in found), max(most for _, most in found)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["divide", "torchao rows", "own per group", "own NVFP4", "own MXFP8, linear"])
def test_values_of_inductor_s_code(ranks: Ranks, name: str, dynamic: bool) -> None:
    for share, most in ranks.run(compiled, name, dynamic):
        assert share <= SPELLINGS[name].share
        assert most <= 1
