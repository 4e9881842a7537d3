"""FlashInfer and a GPU, faked: what the adapter and the machine would say, and a record of what was asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import ProcessGroup

from custom_ops import flashinfer_adapter, machine, probe
from custom_ops.flashinfer_adapter import KernelCall

CPU = torch.device("cpu")


@dataclass
class FakeFlashInfer:
    """What the fake was asked to do, and what it should fail at.

    Attributes:
        events: calls in order, such as ("create", capacity).
        launches: kernels that were launched.
        fails: message that a step raises, by its name: "build", "create", "probe".
        facts: what this rank says about itself.
        free: bytes of memory that are left.
        version: of FlashInfer; None for none.
        capturing: whether a CUDA graph is being captured.
    """

    events: list[tuple[str, Any]] = field(default_factory=list)
    launches: list[KernelCall] = field(default_factory=list)
    fails: dict[str, str] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=lambda: {"device": "NVIDIA H200"})
    free: int = 1 << 40
    version: str | None = "0.7.4"
    capturing: bool = False

    @property
    def names(self) -> list[str]:
        """Names of the events."""
        return [name for name, _ in self.events]

    def step(self, name: str, detail: Any = None) -> None:
        """Note a call; raise if it should fail."""
        self.events.append((name, detail))
        if name in self.fails:
            raise RuntimeError(self.fails[name])

    def create(self, group: ProcessGroup, dtype: torch.dtype, capacity: int, backend: str) -> str:
        """A workspace, which is its own name."""
        self.step("create", capacity)
        return f"{backend}/{group.group_name}/{dtype.itemsize}/{capacity}"

    def facts_of(self, device: torch.device, world_size: int, one_host: bool) -> dict[str, object]:
        """What this rank says about itself; its host only where that counts."""
        return {name: value for name, value in self.facts.items() if one_host or name != "host"}

    def launch(self, workspace: Any, call: KernelCall) -> None:
        """Note a launch; write the input to the outputs."""
        self.launches.append(call)
        for out in (call.allreduce_out, call.residual_out, call.norm_out):
            if out is not None:
                out.copy_(call.allreduce_in)

    def shortage(self, device: torch.device, nbytes: int) -> str | None:
        """Why memory does not suffice."""
        return f"the workspace needs {nbytes} and {self.free} are free" if nbytes > self.free else None


@contextmanager
def faked(fake: FakeFlashInfer | None = None) -> Iterator[FakeFlashInfer]:
    """Put the fake in the place of FlashInfer and of the machine; the CPU plays the GPU."""
    fake = fake or FakeFlashInfer()
    replacements: dict[tuple[Any, str], Any] = {
        (flashinfer_adapter, "version"): lambda: fake.version,
        (flashinfer_adapter, "build"): lambda announce: fake.step("build", announce),
        (flashinfer_adapter, "create"): fake.create,
        (flashinfer_adapter, "release"): lambda workspace, backend: fake.step("release", workspace),
        (flashinfer_adapter, "suffices"): lambda workspace, tokens, hidden, dtype: True,
        (flashinfer_adapter, "launch"): fake.launch,
        (machine, "name"): lambda device: "NVIDIA H200",
        (machine, "capability"): lambda device: (9, 0),
        (machine, "facts"): fake.facts_of,
        (machine, "shortage"): fake.shortage,
        (machine, "capturing"): lambda: fake.capturing,
        (probe, "check_sum"): lambda handle, group, dtype, device: fake.step("probe"),
    }
    with ExitStack() as stack:
        for (module, name), value in replacements.items():
            stack.enter_context(patch.object(module, name, value))
        yield fake
