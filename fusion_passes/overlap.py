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
from fusion_passes.patterns import value
from fusion_passes.reasons import NotFused
from fusion_passes.spare import is_sized, is_spare

RULE = "overlap"
OP = torch.ops.custom_ops.flashinfer_all_reduce.default
IN_PLACE = torch.ops.custom_ops.flashinfer_all_reduce_.default


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
    """Replace a collective and its wait by the op and return the node of its sum."""
    node, result, x = overlap.all_reduce.node, overlap.all_reduce.result, overlap.all_reduce.input
    builder, found = Builder(graph, result), value(x)
    assert found is not None
    flags = {
        "launch_with_pdl": config.launch_with_pdl,
        "fp32_acc": config.fp32_acc,
        "pdl_advance_launch_tokens": config.pdl_advance_launch_tokens,
        "backend": config.backend,
        "check_ranks": config.check_ranks,
    }
    with graph.inserting_before(node):
        # Of a size that is not known yet the op may turn out to be above the limit; it is then reduced where it lies.
        if not is_sized(found) and is_spare(x, node):
            call = builder.mutating(IN_PLACE, {"group_name": overlap.all_reduce.group, **flags}, {"x": x})
            total = builder.item(call, 1)
        else:
            total = builder.node(OP, (x, overlap.all_reduce.group), flags)
            builder.lay_out_contiguously(total)
    result.replace_all_uses_with(total)
    graph.erase_node(result)
    graph.erase_node(node)
    return total
