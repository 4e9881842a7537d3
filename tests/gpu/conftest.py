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
    """A process group with one rank per GPU, on 2, 4, 8 or 16 of them."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [size for size in domain.WORLD_SIZES if size <= found]
    if not sizes:
        pytest.skip(f"needs {domain.WORLD_SIZES[0]} CUDA devices, finds {found}")
    if sizes[-1] not in gpu_pool or not gpu_pool[sizes[-1]].alive:
        gpu_pool[sizes[-1]] = Ranks(sizes[-1], "nccl")
    return gpu_pool[sizes[-1]]
