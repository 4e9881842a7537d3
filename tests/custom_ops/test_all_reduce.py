"""The plain all-reduce on CPU tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import custom_ops
from custom_ops.limits import Strategy
from tests.support.programs import tensors
from tests.support.ranks import Ranks

OP = torch.ops.custom_ops.flashinfer_all_reduce
IN_PLACE = torch.ops.custom_ops.flashinfer_all_reduce_


def values() -> None:
    for shape in [(), (5,), (3, 64), (2, 3, 64), (0, 64), (2, 2, 2, 2)]:
        for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64):
            x = (10 * torch.randn(shape)).to(dtype)
            before, expected = x.clone(), x.clone()
            dist.all_reduce(expected)
            out = OP(x)
            assert torch.equal(out, expected)
            assert torch.equal(x, before)
            assert IN_PLACE(before) is None
            assert torch.equal(before, expected)
            assert out.is_contiguous()
            assert x.numel() == 0 or out.data_ptr() != x.data_ptr()
    assert {launch.strategy for launch in custom_ops.launches()} == {Strategy.UNFUSED}
    transposed = torch.randn(4, 6).t()
    expected = transposed.contiguous()
    dist.all_reduce(expected)
    assert torch.equal(OP(transposed), expected)


def test_values_of_any_rank_and_dtype(ranks: Ranks) -> None:
    ranks.run(values)


@pytest.mark.usefixtures("fake_group")
def test_opcheck() -> None:
    (x,) = tensors(2, 3, 64, count=1)
    torch.library.opcheck(OP.default, (x,))
    torch.library.opcheck(OP.default, (x.transpose(0, 1), "0"), {"launch_with_pdl": False})


@pytest.mark.usefixtures("fake_group")
def test_opcheck_in_place() -> None:
    (x,) = tensors(2, 3, 64, count=1)
    torch.library.opcheck(IN_PLACE.default, (x,))
    torch.library.opcheck(IN_PLACE.default, (x, "0"), {"pdl_advance_launch_tokens": 0})


@pytest.mark.usefixtures("fake_group")
def test_in_place_needs_a_contiguous_tensor() -> None:
    x = torch.arange(12.0).view(3, 4).t()
    with pytest.raises(ValueError, match=r"x of shape \[4, 3\] with strides \[1, 4\]: must be contiguous"):
        IN_PLACE(x)
    assert torch.equal(x, torch.arange(12.0).view(3, 4).t()), "nothing was written"


@pytest.mark.usefixtures("fake_group")
def test_unknown_group() -> None:
    with pytest.raises(ValueError, match="group_name='nobody'"):
        OP(torch.zeros(2, 64), "nobody")
