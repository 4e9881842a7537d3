"""Fixtures: a fake process group in this process, and the report emptied for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings
from torch.testing._internal.distributed.fake_pg import FakeStore

import custom_ops
import fusion_passes
from custom_ops import declared
from tests.support.ranks import Ranks

settings.register_profile("default", max_examples=2000, deadline=None, derandomize=True, database=None)
settings.register_profile("long", max_examples=50_000, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Each test starts with fixed random numbers and empty registries, and leaves the hook as it was."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fusion_passes.reset_report()
    custom_ops.reset_launches()
    declared.forget()
    yield
    fusion_passes.disable()


@pytest.fixture
def fake_group() -> Iterator[str]:
    """Name of a process group of 2 ranks whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    world = dist.group.WORLD
    assert world is not None
    yield world.group_name
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[dict[int, Ranks]]:
    """Process groups of gloo ranks that stay up for the whole run, by world size."""
    pools: dict[int, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def ranks(gloo_pool: dict[int, Ranks]) -> Ranks:
    """A real process group of two gloo ranks."""
    return start(gloo_pool, 2)


@pytest.fixture
def four_ranks(gloo_pool: dict[int, Ranks]) -> Ranks:
    """A real process group of four gloo ranks."""
    return start(gloo_pool, 4)


@pytest.fixture
def eight_ranks(gloo_pool: dict[int, Ranks]) -> Ranks:
    """A real process group of eight gloo ranks."""
    return start(gloo_pool, 8)


def start(pools: dict[int, Ranks], world_size: int, backend: str = "gloo") -> Ranks:
    """The pool of a size; a new one where a failed test has ended it."""
    pool = pools.get(world_size)
    if pool is None or not pool.alive:
        pool = pools[world_size] = Ranks(world_size, backend)
    return pool
