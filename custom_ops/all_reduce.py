"""`flashinfer_all_reduce`: a plain all-reduce through FlashInfer, launched and triggered with PDL by the same rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from custom_ops import (
    backends,
    counters,
    dispatch,
    domain,
    flashinfer_adapter,
    flashinfer_direct,
    groups,
    pdl,
    rank_check,
    ready,
    unfused,
)
from custom_ops.counters import Count, Launch
from custom_ops.flashinfer_direct import Direct
from custom_ops.limits import Strategy
from custom_ops.ready import Ready, Tensors

NAME = "flashinfer_all_reduce"

_FLAGS = (
    "*, bool launch_with_pdl=True, bool fp32_acc=True, int? pdl_advance_launch_tokens=None, str? backend=None, "
    "bool check_ranks=False"
)
torch.library.define(
    f"custom_ops::{NAME}",
    f"(Tensor x, str? group_name=None, {_FLAGS}) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
torch.library.define(
    f"custom_ops::{NAME}_",
    f"(Tensor(a!) x, str? group_name=None, {_FLAGS}) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


_Asked = tuple[bool, bool, int | None, str | None]
"""launch_with_pdl, fp32_acc, pdl_advance_launch_tokens and backend, as they were passed."""


def flashinfer_all_reduce(
    x: Tensor,
    group_name: str | None = None,
    *,
    launch_with_pdl: bool = True,
    fp32_acc: bool = True,
    pdl_advance_launch_tokens: int | None = None,
    backend: str | None = None,
    check_ranks: bool = False,
) -> Tensor:
    """Sum of x over a process group, as a new contiguous tensor; the same as, in eager PyTorch::

        out = x.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(out, group=group)

    Outside of the kernel's domain (world size, hidden size, dtype, device) and above its limits the process group's own
    all-reduce runs; on CPU tensors always.

    Args:
        x: this rank's contribution, any rank from 0 up, any dtype that the process group can reduce.
        group_name: ProcessGroup.group_name; None for the default group.
        launch_with_pdl: programmatic dependent launch.
        fp32_acc: sum over ranks in float32 and round once.
        pdl_advance_launch_tokens: largest number of rows that triggers the successor early; None for
            PDL_ADVANCE_LAUNCH_TOKENS, 0 for never.
        backend: FlashInfer's: "trtllm", the default, for ranks on one host; "mnnvl" for all in one NVLink domain.
        check_ranks: compare shape, type and flags of all ranks first; slow, for finding a mismatch.

    Raises:
        ValueError: unknown group or backend.
        RuntimeError: a workspace would have to be made while a CUDA graph is captured; or ranks differ.
    """
    group = groups.resolve(group_name)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _reduce(x, out, group, (launch_with_pdl, fp32_acc, pdl_advance_launch_tokens, backend), check_ranks)
    return out


def flashinfer_all_reduce_(
    x: Tensor,
    group_name: str | None = None,
    *,
    launch_with_pdl: bool = True,
    fp32_acc: bool = True,
    pdl_advance_launch_tokens: int | None = None,
    backend: str | None = None,
    check_ranks: bool = False,
) -> None:
    """Sum of x over a process group, in place; the same as `torch.distributed.all_reduce(x, group=group)`.

    As flashinfer_all_reduce, but that nothing is copied where the process group's own all-reduce runs.

    Args:
        x: this rank's contribution, contiguous; becomes the sum.
        group_name: ProcessGroup.group_name; None for the default group.
        launch_with_pdl: programmatic dependent launch.
        fp32_acc: sum over ranks in float32 and round once.
        pdl_advance_launch_tokens: as of flashinfer_all_reduce.
        backend: likewise.
        check_ranks: likewise.

    Raises:
        ValueError: unknown group or backend, or x is not contiguous; nothing was written.
        RuntimeError: a workspace would have to be made while a CUDA graph is captured; or ranks differ.
    """
    group = groups.resolve(group_name)
    if not x.is_contiguous():
        raise ValueError(
            f"x of shape {list(x.shape)} with strides {list(x.stride())}: must be contiguous to be reduced in place; "
            "pass x.contiguous(), or use flashinfer_all_reduce"
        )
    out = x if x.data_ptr() % domain.ACCESS_BYTES == 0 else torch.empty_like(x)
    _reduce(x, out, group, (launch_with_pdl, fp32_acc, pdl_advance_launch_tokens, backend), check_ranks)
    if out is not x:
        x.copy_(out)


def _reduce(x: Tensor, out: Tensor, group: ProcessGroup, asked: _Asked, check_ranks: bool) -> None:
    """out = sum of x over the group; out is contiguous, and may be x."""
    if check_ranks:
        rank_check.require_equal(group, NAME, Tensors(x), asked)
    launch_with_pdl, fp32_acc, threshold, backend = asked
    chosen, deterministic = backends.find(backend), torch.are_deterministic_algorithms_enabled()
    if not x.numel():
        return
    kind = None
    if x.is_cuda:
        kind = ready.key((NAME, *asked, deterministic), Tensors(x, allreduce_out=out))
        found = ready.find(group, kind, backend)
        if found is not None and found.launch(Tensors(x, allreduce_out=out), 0.0):
            return
    flat = x.contiguous()
    if flat.data_ptr() % domain.ACCESS_BYTES:
        flat = flat.clone()
    copied = flat.data_ptr() != x.data_ptr()
    threshold = pdl.PDL_ADVANCE_LAUNCH_TOKENS if threshold is None else threshold
    flags = dispatch.Flags(launch_with_pdl, fp32_acc, threshold, backend=chosen, one_shot_only=deterministic)
    direct = _run(flat, out, group, flags, copied)
    if direct is not None and kind is not None and not copied:
        ready.keep(group, kind, Ready(*direct, Tensors(x, allreduce_out=out)))


def _run(
    x: Tensor, out: Tensor, group: ProcessGroup, flags: dispatch.Flags, copied: bool
) -> tuple[Direct, Count] | None:
    """Run a call; how to run the next one like it, where that is known."""
    if x.device.type != "cuda":
        counters.record(Launch(NAME, x.device.type, 0, Strategy.UNFUSED, reason="not a CUDA tensor"))
        unfused.all_reduce_into(out, x, group)
        return None
    hidden = x.shape[-1] if x.dim() else 1
    message = dispatch.Message(x.numel() // hidden, hidden, x.dtype, x.device)
    launch, found = dispatch.plan(NAME, 0, message, group, flags, copied)
    counters.record(launch)
    if found is None:
        unfused.all_reduce_into(out, x, group)
        return None
    call = flashinfer_adapter.KernelCall(
        pattern_code=0,
        allreduce_in=x.view(message.tokens, hidden),
        allreduce_out=out.view(message.tokens, hidden),
        one_shot=launch.one_shot,
        launch_with_pdl=launch.launch_with_pdl,
        completion_at_end=launch.completion_at_end,
        fp32_acc=flags.fp32_acc and x.dtype != torch.float32,
    )
    flashinfer_adapter.launch(found.handle, call)
    if flags.backend.chooses_strategy:
        return None
    direct = flashinfer_direct.direct(found.handle, call, own_residual=True, own_gamma=True)
    return None if direct is None else (direct, counters.count_of(launch))


torch.library.impl(f"custom_ops::{NAME}", ("cpu", "cuda"), flashinfer_all_reduce)
torch.library.impl(f"custom_ops::{NAME}_", ("cpu", "cuda"), flashinfer_all_reduce_)


@torch.library.register_fake(f"custom_ops::{NAME}")
def _fake(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake(f"custom_ops::{NAME}_")
def _fake_in_place(x: Tensor, *args: object, **kwargs: object) -> None:
    return None
