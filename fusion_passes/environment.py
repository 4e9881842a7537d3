"""Where a compiled graph will run: groups, devices, FlashInfer and limits, as the compiling rank sees them."""

from __future__ import annotations

from typing import Any

import torch

from custom_ops import flashinfer_adapter, groups, limits, machine
from custom_ops.formats import Quantisation


class Environment:
    """The machine this process runs on."""

    def world_size(self, group: Any) -> int:
        """Ranks of a process group by name; 0 for one that does not exist here."""
        try:
            return groups.resolve(group).size() if isinstance(group, str) else 0
        except ValueError:
            return 0

    def device_refusal(self, device: torch.device) -> str | None:
        """Why nothing can fuse on a device; None on CPUs, which run the reference, and on GPUs that fit."""
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            return f"device {device}; the op serves CUDA and CPU tensors"
        return machine.device_refusal(device)

    def flashinfer_refusal(self, device: torch.device) -> str | None:
        """Why FlashInfer cannot be used for tensors of a device; None if it can, or is not needed."""
        return None if device.type == "cpu" else flashinfer_adapter.refusal()

    def quantisation_refusal(self, device: torch.device, quantisation: Quantisation) -> str | None:
        """Why a device cannot quantise so; None if it can."""
        return None if device.type == "cpu" else machine.quantisation_refusal(device, quantisation)

    def limits(self, device: torch.device, world_size: int) -> limits.Limits | None:
        """Sizes that run fused; None where there is no limit."""
        return None if device.type == "cpu" else limits.for_device(machine.name(device), world_size)
