"""What both all-reduce ops share: resolve the plan of one call, then run it fused or unfused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from custom_ops import backends, domain, flashinfer_adapter, limits, machine, pdl, workspace
from custom_ops.backends import Backend
from custom_ops.counters import Launch
from custom_ops.formats import Quantisation
from custom_ops.group_state import Workspace
from custom_ops.limits import Strategy


@dataclass(frozen=True)
class Message:
    """The facts of one call that decide how it runs; equal on all ranks."""

    tokens: int
    hidden: int
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Size of the flattened input."""
        return self.tokens * self.hidden * self.dtype.itemsize


@dataclass(frozen=True)
class Flags:
    """What the caller asks of the launch.

    Attributes:
        launch_with_pdl: start while the predecessor drains.
        fp32_acc: sum over ranks in float32.
        advance_launch_tokens: largest number of tokens that triggers early.
        max_token_num: largest number of tokens that runs fused; 0 leaves it to the limits.
        backend: of FlashInfer.
        one_shot_only: whether nothing but one-shot will do.
    """

    launch_with_pdl: bool
    fp32_acc: bool
    advance_launch_tokens: int
    max_token_num: int = 0
    backend: Backend = backends.BACKENDS[backends.DEFAULT]
    one_shot_only: bool = False


def plan(
    op: str,
    pattern_code: int,
    message: Message,
    group: ProcessGroup,
    flags: Flags,
    copied_input: bool = False,
    quantisation: Quantisation | None = None,
) -> tuple[Launch, Workspace | None]:
    """How one CUDA call runs, and the workspace if it runs fused. May make the workspace, then it is collective."""

    def unfused(reason: str) -> tuple[Launch, None]:
        return Launch(op, "cuda", pattern_code, Strategy.UNFUSED, reason=reason, copied_input=copied_input), None

    if refusal := domain.shape_refusal(message.hidden, message.dtype, group.size(), quantisation):
        return unfused(refusal)
    if quantisation and (refusal := machine.quantisation_refusal(message.device, quantisation)):
        return unfused(refusal)
    if 0 < flags.max_token_num < message.tokens:
        return unfused("more tokens than max_token_num")
    if pattern_code not in flags.backend.patterns:
        return unfused(f"FlashInfer's backend {flags.backend.name!r} has no pattern {pattern_code}")
    state = workspace.state_of(group, message.device, flags.backend.name)
    if state.problem:
        return unfused(state.problem)
    strategy = _strategy(message, state.limits, group.size(), flags)
    if strategy is Strategy.UNFUSED:
        return unfused("message above the limit of this device and world size")
    found = workspace.acquire(group, message.dtype, message.device, message.nbytes, flags.backend.name)
    if isinstance(found, str):
        return unfused(found)
    if not flashinfer_adapter.suffices(found.handle, message.tokens, message.hidden, message.dtype):
        return unfused("FlashInfer finds its workspace too small")
    version = flashinfer_adapter.version()
    late = pdl.completion_at_end(message.tokens, strategy, flags.advance_launch_tokens, version)
    return (
        Launch(
            op=op,
            device="cuda",
            pattern_code=pattern_code,
            strategy=strategy,
            launch_with_pdl=pdl.launch_with_pdl(flags.launch_with_pdl, version),
            # A backend that chooses the strategy ignores the flag.
            completion_at_end=late or flags.backend.chooses_strategy,
            copied_input=copied_input,
        ),
        found,
    )


def _strategy(message: Message, found: limits.Limits, world_size: int, flags: Flags) -> Strategy:
    strategy = limits.choose(found, message.tokens, message.hidden, message.dtype.itemsize, world_size)
    if flags.one_shot_only:
        return Strategy.UNFUSED if strategy is Strategy.TWO_SHOT else strategy
    chooses = flags.backend.chooses_strategy and strategy is not Strategy.UNFUSED
    return Strategy.BACKEND if chooses else strategy
