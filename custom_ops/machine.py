"""Facts about this rank's machine, and work that must happen outside of a CUDA graph's memory pool."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple
from pathlib import Path

import torch

from custom_ops import declared, domain, flashinfer_adapter, limits
from custom_ops.formats import Quantisation


def default_device() -> torch.device:
    """The current CUDA device where there is one, otherwise the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def name(device: torch.device) -> str:
    """Name of a CUDA device, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(device)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None where there is no GPU."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None


def device_refusal(device: torch.device) -> str | None:
    """Why the kernel cannot run on this device; None if it can."""
    return domain.device_refusal(capability(device))


def quantisation_refusal(device: torch.device, quantisation: Quantisation) -> str | None:
    """Why the kernel of this FlashInfer cannot quantise so on this device; None if it can."""
    found = domain.device_refusal(capability(device), quantisation)
    return found or flashinfer_adapter.format_refusal(quantisation.format)


def refusal(device: torch.device) -> str | None:
    """Why nothing can run fused on this device with this FlashInfer; None if something can."""
    return device_refusal(device) or flashinfer_adapter.refusal()


def facts(device: torch.device, world_size: int, one_host: bool) -> dict[str, object]:
    """What must be equal on all ranks of a group of some size before one of them launches a kernel.

    Args:
        device: of this rank.
        world_size: of the group.
        one_host: whether the host is one of those facts.
    """
    return {
        **({"host": _host()} if one_host else {}),
        "device": name(device),
        "compute capability": list(capability(device) or ()),
        "flashinfer-python": flashinfer_adapter.version(),
        "limits": list(astuple(limits.for_device(name(device), world_size))),
        **declared.facts(),
    }


def shortage(device: torch.device, nbytes: int) -> str | None:
    """Why nbytes bytes cannot be allocated on the device; None if they can."""
    free, _ = torch.cuda.mem_get_info(device)
    if free < nbytes:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
    return f"the workspace needs {nbytes >> 20} MiB and {free >> 20} MiB are free" if free < nbytes else None


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def attempt(step: Callable[[], None], device: torch.device) -> str | None:
    """Run a step and what it starts on the device in a thread of its own, and say what it raised; None if nothing.

    Whoever warms up or captures a CUDA graph sends the allocations of its thread to the graph's pool, where nothing
    that outlives the graph may lie.
    """
    problems: list[str] = []

    def run() -> None:
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
        except Exception as error:  # whatever a peer must hear of before it waits for this rank
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="custom_ops-workspace")
    thread.start()
    thread.join()
    return problems[0] if problems else None


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
