"""Inductor passes that fuse all-reduce, residual add and RMSNorm of tensor-parallel models into one op.

import torch, fusion_passes

compiled = torch.compile(model, options=fusion_passes.options())
...
for site in fusion_passes.report():
    print(site)
"""

from fusion_passes.allreduce_rms_fusion import AllReduceRMSFusionPass
from fusion_passes.api import disable, enable, enabled, fused_allreduce, options
from fusion_passes.config import FusionConfig
from fusion_passes.inspection import Inspection, inspect_factory, inspect_fusion
from fusion_passes.reasons import NotFused
from fusion_passes.reporting import FusionError, SiteReport, report, reset_report

__all__ = [
    "AllReduceRMSFusionPass",
    "FusionConfig",
    "FusionError",
    "Inspection",
    "NotFused",
    "SiteReport",
    "disable",
    "enable",
    "enabled",
    "fused_allreduce",
    "inspect_factory",
    "inspect_fusion",
    "options",
    "report",
    "reset_report",
]
