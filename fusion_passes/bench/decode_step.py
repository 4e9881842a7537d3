"""One step of a tensor-parallel stack of decoder layers under CUDA graphs, on several paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusion_passes
from fusion_passes import FusionConfig
from fusion_passes.bench import attribution, paths
from fusion_passes.bench.float8_linear import quantise_linears
from fusion_passes.bench.stack import MODELS, Stack
from fusion_passes.bench.timing import Timing, per_call, slowest

COMPARED = ("fused", "overlap", "symm_mem", paths.STOCK)
LINEARS = ("bf16", "fp8", "fp8_token")
"""Types of the linear layers: bfloat16, FP8 with static scales, and FP8 with a scale for each token."""


@dataclass(frozen=True)
class Step:
    """One step, in microseconds per layer.

    Attributes:
        model: one of stack.MODELS.
        batch: tokens: sequences of a decoding step, or the length of a prefill.
        linears: one of LINEARS.
        timings: by path, one of paths.PATHS.
        rules: by path, how many all-reduces were served by which rule.
        differences: by path, the largest difference of an output value from stock.
        kernels: by path, time on the device by what it was spent on; empty where it was not asked for.
    """

    model: str
    batch: int
    linears: str
    timings: dict[str, Timing] = field(default_factory=dict)
    rules: dict[str, dict[str, int]] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, dict[str, float]] = field(default_factory=dict)

    def ratio(self, path: str) -> float:
        """How many times faster than stock."""
        return self.timings[paths.STOCK].median / self.timings[path].median


def measure(
    batch: int,
    model: str = "llama-8b",
    linears: str = "bf16",
    compared: Sequence[str] = COMPARED,
    config: FusionConfig | None = None,
    attribute: bool = False,
    **changes: Any,
) -> Step:
    """Measure one step on the current GPUs; collective over the default group.

    Args:
        batch: tokens.
        model: one of stack.MODELS.
        linears: one of LINEARS.
        compared: paths, one of them stock.
        config: flags of the pass.
        attribute: also ask torch's profiler where the time goes.
        changes: fields of the model's Shape; context=0 makes it a prefill.
    """
    shape, step = replace(MODELS[model], **changes), Step(model, batch, linears)
    torch.manual_seed(dist.get_rank())
    with torch.device("cuda"), torch.inference_mode():
        stack = Stack(shape, batch, dist.get_world_size()).to(torch.bfloat16)
        if linears != "bf16":
            quantise_linears(stack, per_token=linears == "fp8_token")
        torch.manual_seed(1)
        x, angles = torch.randn(batch, shape.hidden).to(torch.bfloat16), shape.angles(batch)
        results = {}
        for path in compared:
            fusion_passes.reset_report()
            run, results[path] = _compiled(stack, x, angles, paths.options(path, config))
            timing = slowest(per_call(run, calls=10 if batch <= 256 else 2))
            step.timings[path] = Timing(*(time / shape.layers for time in (timing.median, timing.low, timing.high)))
            step.rules[path] = dict(Counter(site.rule for site in fusion_passes.report() if site.rule))
            if attribute:
                found = attribution.by_kind(run)
                step.kernels[path] = {kind: time / shape.layers for kind, time in found.items()}
    for path, result in results.items():
        step.differences[path] = (result.float() - results[paths.STOCK].float()).abs().max().item()
    return step


def _compiled(
    stack: Stack, x: Tensor, angles: Tensor, options: dict[str, object]
) -> tuple[Callable[[], Tensor], Tensor]:
    """(one step, its result), warm."""
    torch._dynamo.reset()
    compiled = torch.compile(stack, fullgraph=True, dynamic=False, options=options or None)  # type: ignore[arg-type]

    def run() -> Tensor:
        result: Tensor = compiled(x, angles)
        return result

    for _ in range(2):
        run()
    return run, run().clone()
