"""The one place that touches FlashInfer: is it there, is it built, make a workspace, launch a kernel.

FlashInfer is imported at first use (it takes seconds) and never at import of this package.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from custom_ops import backends
from custom_ops.formats import Format
from custom_ops.quant_arguments import Quantised

logger = logging.getLogger("custom_ops")

REQUIRED = "0.7.2"
COMPANIONS = ("flashinfer-cubin", "flashinfer-jit-cache")
"""Packages with compiled kernels, which must be of the same release."""

PARAMETERS = {"launch_with_pdl", "trigger_completion_at_end", "use_oneshot", "fp32_acc", "weight_bias"}
"""Parameters of FlashInfer's allreduce_fusion that have come and gone between releases."""


@dataclass(frozen=True)
class KernelCall:
    """One launch: contiguous [tokens, hidden] tensors and the resolved flags. Unused outputs are None.

    one_shot is None where the backend chooses.
    """

    pattern_code: int
    allreduce_in: Tensor
    one_shot: bool | None
    launch_with_pdl: bool
    completion_at_end: bool
    fp32_acc: bool
    allreduce_out: Tensor | None = None
    residual: Tensor | None = None
    residual_out: Tensor | None = None
    norm_out: Tensor | None = None
    gamma: Tensor | None = None
    eps: float = 0.0
    weight_bias: float = 0.0
    quantised: Quantised | None = None


@cache
def version() -> str | None:
    """Version of the installed flashinfer-python, without importing it; None if there is none."""
    if importlib.util.find_spec("flashinfer") is None:
        return None
    return _installed("flashinfer-python")


@cache
def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def refusal() -> str | None:
    """Why FlashInfer cannot be used here; None if it can."""
    found = version()
    if found is None:
        return f"flashinfer-python is not installed; install flashinfer-python >= {REQUIRED}"
    if torch.torch_version.TorchVersion(found) < REQUIRED:
        return f"flashinfer-python {found} is too old; install flashinfer-python >= {REQUIRED}"
    for package in COMPANIONS:
        other = _installed(package)
        if other is not None and other.partition("+")[0] != found.partition("+")[0]:
            return f"{package} {other} is not of the release of flashinfer-python {found}; install {package}=={found}"
    return None


def format_refusal(format: Format) -> str | None:
    """Why the all-reduce kernel of this FlashInfer does not quantise to a format; None if it does."""
    found = version()
    if found is not None and torch.torch_version.TorchVersion(found) < format.release:
        return f"flashinfer-python {found} has no {format.title} in its kernel; install >= {format.release}"
    return None


def is_built() -> bool:
    """Whether the all-reduce kernels are compiled; what is not is compiled at first use, in minutes."""
    from flashinfer.jit.comm import gen_trtllm_comm_module

    return bool(gen_trtllm_comm_module().is_compiled)


def build(announce: bool) -> None:
    """Load the all-reduce kernels, compiling them if need be (minutes, once per machine).

    Args:
        announce: log a warning before a compilation starts; one rank does.

    Raises:
        RuntimeError: this FlashInfer lacks a parameter that a launch needs, or the compilation failed.
    """
    from flashinfer.comm import trtllm_ar

    _check_signature()
    if announce and not is_built():
        logger.warning(
            "FlashInfer %s compiles its all-reduce kernels now, once for this machine: expect some minutes. "
            "custom_ops.prepare() does it ahead of time.",
            version(),
        )
    trtllm_ar.get_trtllm_comm_module()


def _check_signature() -> None:
    from flashinfer.comm import allreduce_fusion

    missing = sorted(PARAMETERS - set(inspect.signature(allreduce_fusion).parameters))
    if missing:
        raise RuntimeError(f"flashinfer-python {version()}: allreduce_fusion has no parameter {missing}")


def create(group: ProcessGroup, dtype: torch.dtype, capacity_bytes: int, backend: str) -> Any:
    """A FlashInfer workspace of a backend for messages of up to capacity_bytes; collective over exactly this group.

    FlashInfer sizes it by a product, so one hidden size serves all.
    """
    from flashinfer.comm import create_allreduce_fusion_workspace

    hidden, extra = 1024, {}
    if backend != backends.DEFAULT:
        # Otherwise it talks over the default group.
        from flashinfer.comm.comm_backend import TorchDistBackend

        extra = {"comm_backend": TorchDistBackend(group), "force_oneshot_support": True}
    return create_allreduce_fusion_workspace(
        backend=backend,
        world_size=group.size(),
        rank=group.rank(),
        max_token_num=capacity_bytes // (hidden * dtype.itemsize),
        hidden_dim=hidden,
        dtype=dtype,
        group=group,
        **extra,
    )


def suffices(workspace: Any, tokens: int, hidden: int, dtype: torch.dtype) -> bool:
    """Whether the workspace itself says that it can serve this message."""
    return bool(workspace.is_buffer_size_sufficient(workspace.world_size, tokens, hidden, dtype))


def release(workspace: Any, backend: str) -> None:
    """Free a workspace of a backend, its entry in FlashInfer's own table of references included."""
    if backend == backends.DEFAULT:
        from flashinfer.comm.trtllm_ar import trtllm_destroy_ipc_workspace_for_all_reduce_fusion

        trtllm_destroy_ipc_workspace_for_all_reduce_fusion(workspace.ipc_handles)
    workspace.destroy()


def launch(workspace: Any, call: KernelCall) -> None:
    """Run the kernel on the current stream."""
    from flashinfer.comm import allreduce_fusion

    quantised = call.quantised
    allreduce_fusion(
        input=call.allreduce_in,
        workspace=workspace,
        pattern=call.pattern_code,
        launch_with_pdl=call.launch_with_pdl,
        trigger_completion_at_end=call.completion_at_end,
        # Patterns with a norm write no plain all-reduce, but FlashInfer would allocate a tensor for it.
        output=call.allreduce_out if call.allreduce_out is not None else call.residual_out,
        residual_out=call.residual_out,
        norm_out=call.norm_out,
        residual_in=call.residual,
        rms_gamma=call.gamma,
        rms_eps=call.eps,
        use_oneshot=call.one_shot,
        fp32_acc=call.fp32_acc,
        weight_bias=call.weight_bias,
        **({} if quantised is None else quantising(quantised)),
    )


def quantising(quantised: Quantised) -> dict[str, Any]:
    """The arguments of a launch that quantises."""
    quantisation, scales = quantised.quantisation, quantised.scale_out
    found = quantisation.format
    if scales is not None and found.layouts:
        scales = scales.view(torch.uint8).view(-1)
    return {
        "quant_out": quantised.out,
        "scale_out": scales,
        "scale_factor": quantised.scale,
        "layout_code": quantisation.layout.value if found.layouts else None,
        "block_quant_group_size": None if found.layouts else quantisation.block or None,
    }
