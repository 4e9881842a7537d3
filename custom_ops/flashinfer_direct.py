"""FlashInfer's inner call, for calls whose like has gone through the public one: a seventh of its time on the host."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from custom_ops.flashinfer_adapter import KernelCall, quantising

INNER_PARAMETERS = (
    "allreduce_in", "world_size", "world_rank", "token_num", "hidden_dim", "workspace_ptrs", "launch_with_pdl",
    "use_oneshot", "trigger_completion_at_end", "fp32_acc", "pattern_code", "allreduce_out", "residual_in",
    "residual_out", "norm_out", "quant_out", "scale_out", "rms_gamma", "rms_eps", "scale_factor", "layout_code",
    "block_quant_group_size", "weight_bias",
)  # fmt: skip
"""Parameters of the function that FlashInfer's public one ends in, in the order in which they are passed here."""


@cache
def inner() -> Callable[..., None] | None:
    """That function; None where this release has another."""
    from flashinfer.comm import trtllm_ar

    found = trtllm_ar.get_trtllm_comm_module().trtllm_allreduce_fusion
    return found if tuple(inspect.signature(found).parameters) == INNER_PARAMETERS else None


class Direct:
    """The inner call with all that does not change from call to call; it looks at nothing but addresses.

    Args:
        fn: inner().
        workspace: FlashInfer's workspace; kept alive.
        call: a call of the kind.
        residual: what a call without one adds.
        gamma: what a call without one multiplies by.
    """

    __slots__ = ("_codes", "_fn", "_gamma", "_head", "_residual", "_workspace")

    def __init__(
        self, fn: Callable[..., None], workspace: Any, call: KernelCall, residual: Tensor | None, gamma: Tensor | None
    ) -> None:
        self._fn, self._workspace, self._residual, self._gamma = fn, workspace, residual, gamma
        tokens, hidden = call.allreduce_in.shape
        flags = (call.launch_with_pdl, call.one_shot, call.completion_at_end, call.fp32_acc, call.pattern_code)
        self._head = (workspace.world_size, workspace.rank, tokens, hidden, workspace.workspace_tensor, *flags)
        codes = {} if call.quantised is None else quantising(call.quantised)
        self._codes = (codes.get("layout_code"), codes.get("block_quant_group_size"), call.weight_bias)

    def __call__(self, tensors: DirectTensors, eps: float) -> None:
        """Run the kernel on the current stream."""
        x, residual, gamma, scale, norm_out, quant_out, scale_out, residual_out, allreduce_out = tensors
        self._fn(
            x,
            *self._head,
            allreduce_out,
            self._residual if residual is None else residual,
            residual_out,
            norm_out,
            quant_out,
            scale_out,
            self._gamma if gamma is None else gamma,
            eps,
            scale,
            *self._codes,
        )


DirectTensors = tuple[
    Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
    Tensor | None,
]  # fmt: skip
"""Contribution, residual, gamma, scale; norm, values, scales, new residual, plain sum."""


def direct(workspace: Any, call: KernelCall, own_residual: bool, own_gamma: bool) -> Direct | None:
    """Calls like this one, directly; None where this release of FlashInfer is not known to allow it.

    Args:
        workspace: FlashInfer's workspace.
        call: a call of the kind.
        own_residual: whether such calls bring a residual; otherwise that of this call serves them all.
        own_gamma: likewise for gamma.
    """
    fn = inner()
    if fn is None:
        return None
    return Direct(fn, workspace, call, None if own_residual else call.residual, None if own_gamma else call.gamma)
