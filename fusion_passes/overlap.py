"""The other way to serve an all-reduce: it alone becomes FlashInfer's, and what follows stays Inductor's kernel.

Works for any norm, any quantisation and none, and keeps the roundings of the unfused graph. Launched with PDL and
triggered early, the all-reduce overlaps with the start of its successor, if that was launched with PDL too
(`torch._inductor.config.triton.enable_pdl`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

import custom_ops  # noqa: F401  registers the op
from fusion_passes.builder import Builder
from fusion_passes.collectives import AllReduce
from fusion_passes.config import FusionConfig
from fusion_passes.reasons import NotFused

RULE = "overlap"
OP = torch.ops.custom_ops.flashinfer_all_reduce.default


@dataclass(frozen=True)
class Overlap:
    """An all-reduce that is served alone.

    Attributes:
        all_reduce: the collective.
        left: why its norm is not in the op; None where that was not asked for.
    """

    all_reduce: AllReduce
    left: NotFused | None


def rewrite(graph: Graph, overlap: Overlap, config: FusionConfig) -> Node:
    """Replace a collective and its wait by the op and return the node of its call."""
    node, result = overlap.all_reduce.node, overlap.all_reduce.result
    builder = Builder(graph, result)
    with graph.inserting_before(node):
        flags = {
            "launch_with_pdl": config.launch_with_pdl,
            "fp32_acc": config.fp32_acc,
            "pdl_advance_launch_tokens": config.pdl_advance_launch_tokens,
        }
        call = builder.node(OP, (overlap.all_reduce.input, overlap.all_reduce.group), flags)
        builder.lay_out_contiguously(call)
    result.replace_all_uses_with(call)
    graph.erase_node(result)
    graph.erase_node(node)
    return call
