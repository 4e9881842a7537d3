"""Run-time side: all-reduce and quantising ops on FlashInfer's kernels, with a reference on the CPU.

Importing this package registers `torch.ops.custom_ops.call_trtllm_fused_allreduce_norm`, `flashinfer_all_reduce` and
the quantising ops `scaled_fp8_quant`, `mxfp8_quant` and `scaled_fp4_quant`. It needs neither a GPU nor FlashInfer.
"""

from custom_ops.all_reduce import flashinfer_all_reduce, flashinfer_all_reduce_
from custom_ops.allreduce_norm import call_trtllm_fused_allreduce_norm
from custom_ops.counters import Launch, launches, reset_launches
from custom_ops.formats import FORMATS
from custom_ops.limits import Limits, Strategy
from custom_ops.pdl import PDL_ADVANCE_LAUNCH_TOKENS
from custom_ops.quant_ops import mxfp8_quant, scaled_fp4_quant, scaled_fp8_quant
from custom_ops.tuning import use_profile
from custom_ops.workspace import destroy, prepare, workspaces

__all__ = [
    "FORMATS",
    "PDL_ADVANCE_LAUNCH_TOKENS",
    "Launch",
    "Limits",
    "Strategy",
    "call_trtllm_fused_allreduce_norm",
    "destroy",
    "flashinfer_all_reduce",
    "flashinfer_all_reduce_",
    "launches",
    "mxfp8_quant",
    "prepare",
    "reset_launches",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "use_profile",
    "workspaces",
]
