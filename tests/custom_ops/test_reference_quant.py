"""The quantising arithmetic against torchao's quantisers, against formulas taken bit by bit, and at its edges."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
from torchao.prototype.mx_formats.utils import to_blocked
from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

from custom_ops import formats, reference_quant
from custom_ops.formats import Layout
from tests.support import codes

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLOAT4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def activations(rows: int = 130, hidden: int = 2880, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of very different sizes, among them zeros."""
    made = torch.randn(rows, hidden) * torch.logspace(-6, 3, rows)[:, None]
    made[3] = 0
    return made.to(dtype)


def bits(value: float) -> int:
    """The bits of a float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_mxfp8_equals_torchao(dtype: torch.dtype) -> None:
    x = activations(dtype=dtype)
    values, scales = reference_quant.quantise(x, formats.choose("mxfp8"))
    scales_expected, expected = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
    assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
    # A block of zeros has the smallest exponent in both; what torchao divides it by does not matter.
    assert scales is not None
    assert torch.equal(scales, scales_expected.view(torch.uint8).view_as(scales))


def test_nvfp4_equals_torchao_but_for_ties_that_its_order_of_products_moves() -> None:
    x = activations()
    amax = x.abs().max().float()
    scale = amax / (448 * 6)
    values, scales = reference_quant.quantise(x, formats.choose("nvfp4"), 1 / scale)
    scales_expected, expected = nvfp4_quantize(x, 16, scale)
    assert scales is not None
    # torchao keeps a block scale from falling below the smallest normal number of its type.
    large = scales_expected.float() > 2.0**-6
    assert large.float().mean() > 0.3
    share, most = codes.distance(scales[large], scales_expected[large])
    assert share < 0.05
    assert most <= 1
    blocks = (large & (scales.float() == scales_expected.float())).repeat_interleave(8, -1)
    share, most = codes.distance(values[blocks], expected[blocks])
    assert share < 3e-3
    assert most <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_per_token_equals_torchao_but_for_ties(dtype: torch.dtype) -> None:
    x = activations(dtype=dtype)[4:]
    values, scales = reference_quant.quantise(x, formats.choose("fp8_token"))
    assert scales is not None
    wide = x.float()
    scales_expected = _choose_scale_float8(wide, (1, x.shape[1]))
    expected = _quantize_affine_float8(wide, scales_expected)
    floor = scales_expected > reference_quant.SMALLEST_TOKEN_SCALE
    assert floor.any()
    assert (~floor).any()
    torch.testing.assert_close(scales[floor], scales_expected[floor], rtol=2**-23, atol=0)
    share, most = codes.distance(values[floor[:, 0]], expected[floor[:, 0]])
    assert share < 1e-3
    assert most <= 1
    assert (scales[~floor] == reference_quant.SMALLEST_TOKEN_SCALE).all() or (scales[~floor] >= 4.3596e-06).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_static_equals_torchao_where_one_over_the_scale_is_exact(dtype: torch.dtype) -> None:
    x, scale = activations(dtype=dtype), torch.tensor(0.25)
    values, scales = reference_quant.quantise(x, formats.choose("fp8"), scale)
    assert scales is None
    assert torch.equal(values.view(torch.uint8), _quantize_affine_float8(x, scale).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [16, 96, 128])
def test_per_group_scale_is_the_next_power_of_two(dtype: torch.dtype, group: int) -> None:
    x = activations(32, 384, dtype)
    values, exponents = reference_quant.quantise(x, formats.choose("fp8_group", group_size=group))
    assert exponents is not None
    for row in range(0, 32, 5):
        for at in range(0, 384, group):
            part = x[row, at : at + group].double()
            least = max(part.abs().max().item() / 448, 1e-10)
            exponent = math.ceil(math.log2(least))
            assert exponents[row, at // group].item() == exponent + 127
            expected = (part * 2.0**-exponent).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(values[row, at : at + group].view(torch.uint8), expected.view(torch.uint8))


def test_mxfp8_exponents_of_every_bfloat16() -> None:
    every = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    blocks = torch.zeros(len(every), 32).bfloat16()
    blocks[:, 7] = every
    _, exponents = reference_quant.quantise(blocks, formats.choose("mxfp8"))
    assert exponents is not None
    for value, found in zip(every.tolist()[::7], exponents[::7, 0].tolist(), strict=True):
        over = value / 448
        expected = max(0, min(254, math.ceil(math.log2(over)) + 127)) if over >= 2.0**-126 else 0
        assert found == expected, value


def test_float4_rounds_to_the_nearest_and_ties_to_the_even_code() -> None:
    grid = torch.arange(-7, 7, 1 / 64)
    for value, code in zip(grid.tolist(), reference_quant._to_float4(grid).tolist(), strict=True):
        sizes = [abs(abs(value) - size) for size in FLOAT4]
        nearest = [index for index, apart in enumerate(sizes) if apart == min(sizes)]
        assert code & 7 == next(index for index in nearest if len(nearest) == 1 or index % 2 == 0)
        assert code >> 3 == (value < 0)


def test_float4_packs_the_first_of_two_values_low() -> None:
    x = torch.zeros(1, 16).bfloat16()
    x[0, :4] = torch.tensor([6.0, -3.0, 0.5, 0.0])
    values, scales = reference_quant.quantise(x, formats.choose("nvfp4"), torch.tensor(1.0))
    assert scales is not None
    assert scales.float().tolist() == [[1.0]]
    assert values[0, :3].tolist() == [7 | 13 << 4, 1, 0]


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -0.5, 1e-40, 3e38])
def test_odd_static_scales_have_a_defined_result(scale: float) -> None:
    x = torch.tensor([[0.0, 1.0, -2.0, math.nan, math.inf]]).bfloat16()
    values = reference_quant.quantise(x, formats.choose("fp8"), torch.tensor(scale))[0].view(torch.uint8).tolist()[0]
    nan, most = 0x7F, 0x7E
    expected = {
        "0.0": [nan, most, most | 0x80, nan, most],
        "inf": [0, 0, 0x80, nan, nan],
        "nan": [nan] * 5,
        "-0.5": [0x80, 0xC0, 0x48, nan, most | 0x80],
        "1e-40": [nan, most, most | 0x80, nan, most],  # subnormal numbers count as zero
        "3e+38": [0, 0, 0x80, nan, nan],  # and so does the reciprocal of this one
    }
    assert values == expected[str(scale)]


def test_nan_and_infinity_in_dynamic_formats() -> None:
    x = torch.zeros(3, 128).bfloat16()
    x[0], x[0, 5] = 2.0, math.nan
    x[1], x[1, 5] = 2.0, math.inf
    expected_nan = {"fp8_token": 0xFE, "fp8_group": 0xFE, "mxfp8": 0x7E}
    for name, code in expected_nan.items():
        group = 128 if name == "fp8_group" else None
        values = reference_quant.quantise(x, formats.choose(name, group_size=group))[0].view(torch.uint8)
        assert values[0, 5] == code, "a NaN becomes the bound that the kernel's clamp lets it have"
        assert values[0, 6] == {"fp8_token": 0x7E, "fp8_group": 0x78, "mxfp8": 0x78}[name], "and does not count"
        assert values[1, 5] == code
        assert values[1, 6] == 0, "beside an infinity all else is zero"
        assert (values[2] == 0).all()


@pytest.mark.parametrize(("tokens", "columns"), [(1, 4), (5, 7), (128, 8), (129, 90), (300, 3)])
def test_swizzled_scales_lie_where_torchao_puts_them(tokens: int, columns: int) -> None:
    scales = torch.randint(1, 255, (tokens, columns), dtype=torch.uint8)
    quantisation = formats.choose("mxfp8")
    buffer = quantisation.scales(tokens, 32 * columns)
    assert buffer is not None
    into = buffer.zeros(torch.device("cpu"))
    reference_quant.write_scales(scales, into, quantisation)
    assert torch.equal(into.view(torch.uint8).flatten(), to_blocked(scales).flatten())


def test_packed_exponents_lie_column_by_column() -> None:
    exponents = torch.arange(1, 5 * 6 + 1, dtype=torch.uint8).view(5, 6)
    quantisation = formats.choose("fp8_group", group_size=32)
    buffer = quantisation.scales(5, 6 * 32)
    assert buffer is not None
    assert (buffer.shape, buffer.stride) == ((5, 2), (1, 8))
    memory = torch.full((16,), -1, dtype=torch.int32)
    reference_quant.write_scales(exponents, memory.as_strided(buffer.shape, buffer.stride), quantisation)
    as_bytes = memory.view(torch.uint8).view(16, 4)
    assert torch.equal(as_bytes[:5], exponents[:, :4])
    assert (as_bytes[5:8] == 0).all(), "rows that pad a column"
    assert torch.equal(as_bytes[8:13, :2], exponents[:, 4:])
    assert (as_bytes[8:13, 2:] == 0).all(), "groups that pad a pack"
    assert (as_bytes[13:] == 255).all(), "the last column is not padded"


def test_linear_scales_lie_row_by_row() -> None:
    quantisation = formats.choose("nvfp4", layout_code=Layout.LINEAR)
    buffer = quantisation.scales(5, 96)
    assert buffer is not None
    assert (buffer.shape, buffer.stride, buffer.dtype) == ((5, 6), (6, 1), torch.float8_e4m3fn)


def test_reciprocal_flushes_subnormal_numbers() -> None:
    x = torch.tensor([1e-40, -1e-40, 2.0, 3e38, 0.0])
    found = reference_quant.reciprocal(x).tolist()
    assert found == [math.inf, -math.inf, 0.5, 0.0, math.inf]
    assert bits(found[2]) == bits(0.5)
