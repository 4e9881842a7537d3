"""The ways to compile a model that are measured against each other. One table."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.allreduce_rms_fusion import AllReduceRMSFusionPass
from fusion_passes.environment import Environment

STOCK = "stock"
INDUCTOR_PDL: dict[str, Any] = {"triton.enable_pdl": True}


def _symm_mem(config: FusionConfig, environment: Environment | None) -> dict[str, Any]:
    """Inductor's own choice of one-shot all-reduces in symmetric memory, for messages of any size."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    world = dist.group.WORLD
    assert world is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of later releases, which need no call
        enable_symm_mem_for_group(world.group_name)
    # Inductor draws the names of its symmetric buffers with it, Dynamo puts it back after each compilation, and a name
    # that was drawn before must have the same size.
    random.seed()
    return {"_collective.auto_select": True, "_collective.one_shot_all_reduce_threshold_bytes": 1 << 40}


def _with_pass(**changes: Any) -> Callable[[FusionConfig, Environment | None], dict[str, Any]]:
    def options(config: FusionConfig, environment: Environment | None) -> dict[str, Any]:
        return {fusion_passes.api.HOOK: AllReduceRMSFusionPass(replace(config, **changes), environment)}

    return options


def _with_inductor_pdl(path: str) -> Callable[[FusionConfig, Environment | None], dict[str, Any]]:
    return lambda config, environment: {**PATHS[path](config, environment), **INDUCTOR_PDL}


PATHS: dict[str, Callable[[FusionConfig, Environment | None], dict[str, Any]]] = {
    "fused": _with_pass(norm_path="fused"),
    "norms": _with_pass(norm_path="fused", fuse_quantisation=False),
    "overlap": _with_pass(norm_path="overlap"),
    "fused_pdl": _with_inductor_pdl("fused"),
    "overlap_pdl": _with_inductor_pdl("overlap"),
    "symm_mem": _symm_mem,
    STOCK: lambda config, environment: {},
}
"""By name, the options of torch.compile: the whole chain in the op; norms without their quantisation; the all-reduce
alone; both with Inductor's `triton.enable_pdl`; torch's one-shot in symmetric memory; and nothing."""


def options(path: str, config: FusionConfig | None = None, environment: Environment | None = None) -> dict[str, Any]:
    """Options of torch.compile for a path.

    Args:
        path: one of PATHS.
        config: flags of the pass.
        environment: the machine that the pass sees; None for this one.
    """
    return PATHS[path](config or FusionConfig(), environment)
