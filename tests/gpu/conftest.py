"""Ranks on real GPUs, as many as the kernel serves; every test here carries the marker gpu."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from custom_ops import domain
from tests.support.ranks import Ranks

HERE = __name__.rpartition(".")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in this folder."""
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def gpu_pool() -> Iterator[dict[int, Ranks]]:
    """The pool of ranks, kept up between tests."""
    pool: dict[int, Ranks] = {}
    yield pool
    for ranks in pool.values():
        ranks.stop()


@pytest.fixture
def gpus(gpu_pool: dict[int, Ranks]) -> Ranks:
    """A process group with one rank per GPU, on 2, 4, 8 or 16 of them; on a single one two ranks that share it."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        pytest.skip("needs a CUDA device")
    size = max(count for count in domain.WORLD_SIZES if count <= max(found, 2))
    if size not in gpu_pool or not gpu_pool[size].alive:
        gpu_pool[size] = Ranks(size, "nccl") if found > 1 else Ranks(size, shared_gpu=True)
    return gpu_pool[size]
