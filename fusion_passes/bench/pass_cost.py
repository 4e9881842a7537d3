"""What the pass costs at compile time, by the number of layers: per all-reduce, and as a share of the compilation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.utils import compilation_time_metrics
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

import fusion_passes
from fusion_passes import compat, fake_machine
from fusion_passes.bench.stack import Shape, Stack

LAYERS = (10, 100)
RANKS = 2


@dataclass(frozen=True)
class Cost:
    """One compilation of a Llama-shaped stack, on CPU tensors, with empty caches.

    Attributes:
        layers: decoder layers.
        nodes: of the graph.
        sites: all-reduces, all of which fuse.
        in_pass: seconds in the pass.
        in_inductor: seconds from AOTAutograd's graph to compiled code.
        whole: seconds of the first call: Dynamo, AOTAutograd and Inductor.
    """

    layers: int
    nodes: int
    sites: int
    in_pass: float
    in_inductor: float
    whole: float

    @property
    def ms_per_site(self) -> float:
        """Milliseconds in the pass for each all-reduce."""
        return self.in_pass / self.sites * 1e3

    @property
    def share(self) -> float:
        """Of the time in Inductor."""
        return self.in_pass / self.in_inductor


def sweep(layers: Sequence[int] = LAYERS) -> list[Cost]:
    """Measure some numbers of layers, after one small compilation that loads what is loaded once."""
    with fake_machine.process_group(RANKS), torch.no_grad():
        _measure(1)
        return [_measure(count) for count in layers]


def _measure(layers: int) -> Cost:
    shape = Shape(hidden=64, intermediate=64, heads=4, kv_heads=2, layers=layers, context=4)
    stack, clock = Stack(shape, 1, RANKS).to(torch.bfloat16), _Clock()
    torch._dynamo.reset()
    compilation_time_metrics.clear()
    with fresh_cache(), compat.without_caches():
        compiled = torch.compile(stack, options={"post_grad_custom_post_pass": clock})
        start = time.perf_counter()
        compiled(torch.randn(1, shape.hidden).to(torch.bfloat16), torch.rand(shape.hidden // shape.heads // 2))
        whole = time.perf_counter() - start
    return Cost(
        layers, clock.nodes, 2 * layers, clock.seconds, sum(compilation_time_metrics["compile_fx_inner"]), whole
    )


class _Clock(fusion_passes.AllReduceRMSFusionPass):
    """The pass, with a watch on it."""

    def __init__(self) -> None:
        super().__init__(fusion_passes.FusionConfig(strict=True))
        self.seconds, self.nodes = 0.0, 0

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Rewrite a graph in place and take the time."""
        self.nodes += len(graph.nodes)
        start = time.perf_counter()
        super().__call__(graph, is_inference)
        self.seconds += time.perf_counter() - start
