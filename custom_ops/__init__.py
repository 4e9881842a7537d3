"""Run-time side: all-reduce ops on FlashInfer's kernels, with a reference on the CPU.

Importing this package registers `torch.ops.custom_ops.call_trtllm_fused_allreduce_norm` and
`torch.ops.custom_ops.flashinfer_all_reduce`. It needs neither a GPU nor FlashInfer.
"""

from custom_ops.all_reduce import flashinfer_all_reduce
from custom_ops.allreduce_norm import call_trtllm_fused_allreduce_norm
from custom_ops.counters import Launch, launches, reset_launches
from custom_ops.limits import Limits, Strategy
from custom_ops.pdl import PDL_ADVANCE_LAUNCH_TOKENS
from custom_ops.workspace import destroy, prepare, workspaces

__all__ = [
    "PDL_ADVANCE_LAUNCH_TOKENS",
    "Launch",
    "Limits",
    "Strategy",
    "call_trtllm_fused_allreduce_norm",
    "destroy",
    "flashinfer_all_reduce",
    "launches",
    "prepare",
    "reset_launches",
    "workspaces",
]
