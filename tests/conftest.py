"""Fixtures: a fake process group in this process, and the report emptied for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import custom_ops
import fusion_passes


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Each test starts with fixed random numbers and empty registries, and leaves the hook as it was."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fusion_passes.reset_report()
    custom_ops.reset_launches()
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
