"""What the kernel can serve."""

from __future__ import annotations

import pytest
import torch

from custom_ops import domain

REAL_HIDDEN_SIZES = (
    576, 960, 1024, 1152, 1536, 1792, 2048, 2304, 2560, 2688, 2816, 2880, 3072, 3584, 3840, 4096, 4608, 5120, 5376,
    6144, 7168, 8192, 12288, 16384,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", REAL_HIDDEN_SIZES)
def test_hidden_sizes_of_real_models_are_served(hidden: int, dtype: torch.dtype) -> None:
    for world_size in (2, 4, 8, 16):
        assert domain.shape_refusal(hidden, dtype, world_size) is None
    # One-shot covers a token exactly: blocks times threads is one access per thread.
    threads = domain.block_threads(hidden, dtype.itemsize)
    assert (hidden * dtype.itemsize // 16) % threads == 0


@pytest.mark.parametrize(
    ("hidden", "dtype", "world_size", "mentions"),
    [
        (4096, torch.bfloat16, 1, "world size 1"),
        (4096, torch.bfloat16, 3, "world size 3"),
        (4096, torch.bfloat16, 32, "world size 32"),
        (4096, torch.float64, 2, "float64"),
        (4096, torch.int32, 2, "int32"),
        (4095, torch.bfloat16, 2, "multiple of 16 bytes"),
        (4098, torch.float32, 2, "multiple of 16 bytes"),
        (8 * 1031, torch.bfloat16, 2, "1031 threads"),
        (8 * 2 * 521, torch.bfloat16, 2, "521 threads"),
    ],
)
def test_everything_else_is_refused_by_name(hidden: int, dtype: torch.dtype, world_size: int, mentions: str) -> None:
    refusal = domain.shape_refusal(hidden, dtype, world_size)
    assert refusal is not None
    assert mentions in refusal


def test_devices() -> None:
    assert domain.device_refusal((9, 0)) is None
    assert domain.device_refusal((10, 0)) is None
    assert "8.0" in str(domain.device_refusal((8, 0)))
    assert "no CUDA device" in str(domain.device_refusal(None))


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_capacity_stays_within_the_kernels_integers(world_size: int) -> None:
    # The kernel computes 2 * world size * capacity in a signed 32-bit integer.
    assert 2 * world_size * domain.max_capacity(world_size) < 2**31
