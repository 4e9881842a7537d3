"""What programmatic dependent launch and its early trigger gain, before consumers that are launched with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
from fusion_passes.bench import paths
from fusion_passes.bench.timing import Timing, per_call, slowest

EPS = 1e-6
TOKENS = (1, 2, 4, 8, 16, 32, 64)
NEVER, ALWAYS = 0, 1 << 30


@dataclass(frozen=True)
class Overlapped:
    """One consumer and size; microseconds for the all-reduce and its consumer.

    Attributes:
        consumer: what follows.
        tokens: rows.
        without: neither is launched with PDL.
        late: both are; the all-reduce triggers after its last store.
        early: both are; it triggers at once.
    """

    consumer: str
    tokens: int
    without: Timing
    late: Timing
    early: Timing


@dataclass(frozen=True)
class Trigger:
    """How the all-reduce and its consumer are launched: with PDL or without, triggering early up to so many tokens."""

    pdl: bool
    threshold: int


TRIGGERS = {"without": Trigger(False, NEVER), "late": Trigger(True, NEVER), "early": Trigger(True, ALWAYS)}
Run = Callable[[], object]


def _projection(hidden: int, features: int, rows: int) -> Callable[[int, Trigger], Run]:
    """The fused op and a projection of its norm whose weights are read before the op is waited for."""
    weight = torch.randn(features, hidden, device="cuda", dtype=torch.bfloat16) / hidden**0.5

    def prepare(tokens: int, trigger: Trigger) -> Run:
        from fusion_passes.bench import pdl_kernels

        op = fused_op(tokens, hidden)
        out = torch.empty(tokens, features, device="cuda")

        def run() -> None:
            normed = op(trigger)
            pdl_kernels.projection(normed, weight, out, trigger.pdl, rows)

        return run

    return prepare


def _add_norm(hidden: int) -> Callable[[int, Trigger], Run]:
    """The plain all-reduce, and add and norm as Inductor makes a kernel of them."""
    norm = torch.nn.RMSNorm(hidden, EPS, device="cuda", dtype=torch.bfloat16)

    def prepare(tokens: int, trigger: Trigger) -> Run:
        x, residual = (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))

        def fn(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = residual + plain_all_reduce(x, trigger)
            return norm(total), total

        torch._dynamo.reset()
        options = paths.INDUCTOR_PDL if trigger.pdl else None
        compiled = torch.compile(fn, fullgraph=True, dynamic=False, options=options)
        return lambda: compiled(x, residual)

    return prepare


CONSUMERS: dict[str, tuple[Callable[..., Callable[[int, Trigger], Run]], tuple[int, ...]]] = {
    "router, 7168 x 256": (_projection, (7168, 256, 2)),
    "projection, 4096 x 3072": (_projection, (4096, 3072, 4)),
    "Inductor's add and norm, 4096": (_add_norm, (4096,)),
}
"""What follows the all-reduce, by name: the router of DeepSeek-V3, for which the threshold of 16 tokens was found; a
projection with more blocks than the GPU holds at once; and Inductor's own kernel."""

COUNT = len(CONSUMERS) * len(TOKENS)


def measure(tokens: Sequence[int] = TOKENS, consumers: Sequence[str] = tuple(CONSUMERS)) -> Iterator[Overlapped]:
    """Measure on the current GPUs; collective over the default group."""
    for name in consumers:
        make, sizes = CONSUMERS[name]
        with torch.inference_mode():
            prepare = make(*sizes)
            for count in tokens:
                times = {}
                for kind, trigger in TRIGGERS.items():
                    run = prepare(count, trigger)
                    for _ in range(3):
                        run()
                    times[kind] = slowest(per_call(run, calls=20))
                yield Overlapped(name, count, **times)


def plain_all_reduce(x: Tensor, trigger: Trigger) -> Tensor:
    """The sum of x over the default group."""
    total: Tensor = torch.ops.custom_ops.flashinfer_all_reduce.default(
        x, launch_with_pdl=trigger.pdl, pdl_advance_launch_tokens=trigger.threshold
    )
    return total


def fused_op(tokens: int, hidden: int) -> Callable[[Trigger], Tensor]:
    """The fused op on fixed tensors; returns its norm."""
    x, residual, norm_out, residual_out = (
        torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    gamma, size = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), dist.get_world_size()

    def op(trigger: Trigger) -> Tensor:
        custom_ops.call_trtllm_fused_allreduce_norm(
            x, residual, gamma, EPS, size, trigger.pdl, True, 0, 1, norm_out,
            residual_out=residual_out, pdl_advance_launch_tokens=trigger.threshold,
        )  # fmt: skip
        return norm_out

    return op
