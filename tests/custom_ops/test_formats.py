"""The table of formats: choices, refusals, and the tensors of scales."""

from __future__ import annotations

import pytest
import torch

from custom_ops import domain, formats, pattern_codes
from custom_ops.formats import FORMATS, Layout


def test_every_format_has_its_arithmetic_and_its_patterns() -> None:
    from custom_ops.reference_quant import ARITHMETIC

    assert set(ARITHMETIC) == set(FORMATS)
    for name, row in FORMATS.items():
        for norm_out in (False, True):
            pattern = pattern_codes.find(name, norm_out)
            assert pattern.format == name
            assert ("norm_out" in pattern.outputs) == norm_out
            assert ("scale_factor" in pattern.inputs) == row.takes_scale
            assert ("scale_out" in pattern.outputs) == (row.scales is not None)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", [*Layout, None, 7])
def test_only_listed_layouts_are_taken(name: str, layout: int | None) -> None:
    group = 32 if name == "fp8_group" else None
    if layout is None or layout in FORMATS[name].layouts:
        assert formats.choose(name, layout_code=layout, group_size=group).format.name == name
        return
    with pytest.raises(ValueError, match=rf"layout_code={int(layout)}: .* laid out as"):
        formats.choose(name, layout_code=layout, group_size=group)


def test_the_packed_format_has_one_place_for_its_scales() -> None:
    with pytest.raises(ValueError, match="layout_code=0: per-group FP8 scales can be laid out as None"):
        formats.choose("fp8_group", layout_code=0, group_size=128)


@pytest.mark.parametrize("size", [None, 0, -8])
def test_groups_need_a_size(size: int | None) -> None:
    with pytest.raises(ValueError, match=f"block_quant_group_size={size}: per-group FP8 needs a positive number"):
        formats.choose("fp8_group", group_size=size)


def test_other_formats_take_no_size() -> None:
    with pytest.raises(ValueError, match="block_quant_group_size=64: MXFP8 takes none"):
        formats.choose("mxfp8", group_size=64)


@pytest.mark.parametrize(
    ("name", "group", "hidden", "dtype", "text"),
    [
        ("fp8", None, 100, torch.float32, None),
        ("fp8_group", 128, 2880, torch.bfloat16, "hidden size 2880: in per-group FP8 128 elements share a scale"),
        ("fp8_group", 96, 2880, torch.bfloat16, None),
        ("mxfp8", None, 2880, torch.float32, None),
        ("mxfp8", None, 1000, torch.bfloat16, "hidden size 1000: in MXFP8 32 elements share a scale"),
        ("nvfp4", None, 1000, torch.bfloat16, "hidden size 1000: in NVFP4 16 elements share a scale"),
        ("nvfp4", None, 1024, torch.float32, "activations of torch.float32: NVFP4 is made of"),
        ("nvfp4", None, 1023, torch.bfloat16, "hidden size 1023"),
    ],
)
def test_refusal(name: str, group: int | None, hidden: int, dtype: torch.dtype, text: str | None) -> None:
    found = formats.refusal(formats.choose(name, group_size=group), hidden, dtype)
    assert found is None if text is None else found is not None and found.startswith(text)


def test_formats_of_later_devices_are_refused_on_earlier_ones() -> None:
    nvfp4, mxfp8 = formats.choose("nvfp4"), formats.choose("mxfp8")
    assert domain.device_refusal((9, 0), nvfp4) == "compute capability 9.0: NVFP4 in the kernel needs 10.0 or later"
    assert domain.device_refusal((10, 0), nvfp4) is None
    assert domain.device_refusal((9, 0), mxfp8) is None
    assert domain.device_refusal((8, 0), mxfp8) == "compute capability 8.0: MXFP8 in the kernel needs 9.0 or later"


@pytest.mark.parametrize(
    ("hidden", "group", "threads"),
    [(7168, 128, 224), (2880, 64, 360), (2880, 96, 180), (5760, 64, 360), (1792, 128, 224)],
)
def test_blocks_hold_whole_groups(hidden: int, group: int, threads: int) -> None:
    assert domain.block_threads(hidden, 2, group) == threads
    assert threads * 8 % group == 0
    assert domain.shape_refusal(hidden, torch.bfloat16, 2, formats.choose("fp8_group", group_size=group)) is None


def test_groups_that_need_too_large_blocks_are_refused() -> None:
    quantisation = formats.choose("fp8_group", group_size=4672)
    assert domain.shape_refusal(9344, torch.bfloat16, 2) is None
    refused = domain.shape_refusal(9344, torch.bfloat16, 2, quantisation)
    assert refused is not None
    assert "needs blocks of 584 threads" in refused
