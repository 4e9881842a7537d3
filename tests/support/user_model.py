"""A model file as a user of `explain` has it: factories that return a module and its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support.models import parallel_llama
from tests.support.programs import NORMS, AddNorm, reduce


def llama(layers: int = 2) -> tuple[nn.Module, Tensor]:
    """Sharded over as many ranks as there are."""
    mesh = init_device_mesh(torch.get_default_device().type, (torch.distributed.get_world_size(),))
    return parallel_llama(mesh, layers=layers), torch.zeros(2, 16, dtype=torch.int64)


def twelve() -> tuple[nn.Module, Tensor]:
    return llama(12)


def deep() -> tuple[nn.Module, Tensor]:
    return llama(60)


class Half(nn.Module):
    """One site that fuses and one that has a LayerNorm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = AddNorm(NORMS["meta"]())
        self.second = nn.LayerNorm(64, dtype=torch.bfloat16)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        normed, residual = self.first(x, residual)
        return self.second(residual + reduce(normed))


def half() -> tuple[nn.Module, dict[str, Tensor]]:
    x = torch.zeros(2, 8, 64, dtype=torch.bfloat16)
    return Half(), {"x": x, "residual": x.clone()}


def alone() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 4), torch.zeros(2, 4)


def nothing() -> Any:
    return nn.Linear(4, 4)
