"""Random calls at full rate for as long as SOAK_SECONDS says (20 by default, `make soak` ten minutes)."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

import custom_ops
from custom_ops import domain, pattern_codes, reference_quant, workspace
from custom_ops.limits import Limits
from tests.support import gpu
from tests.support.gpu import EPS, case
from tests.support.quantised import CASES, Outputs, quantisation_of, raw
from tests.support.ranks import Ranks

SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))
HIDDEN = (1024, 1792, 2048, 2880, 3584, 4096, 5376, 7168, 8192)
DTYPES = (torch.bfloat16, torch.float16)
FORMATS = (None, *(name for name in CASES if not name.startswith(("mxfp8", "nvfp4"))))
"""Formats of the norm behind the sum that run before Blackwell."""


@dataclass
class Soaked:
    """What a soak did: calls, by strategy; wrong values; and bytes in use before and after."""

    calls: int
    strategies: dict[str, int]
    wrong: int
    before: int
    after: int


def soak(seconds: float, seed: int) -> Soaked:
    """The same random bursts on all ranks; wrong values are counted on the device, and nothing waits within a burst."""
    choice, group = random.Random(seed), dist.group.WORLD
    assert group is not None
    state = workspace.state_of(group, gpu.device())
    usual = state.limits
    most = min(domain.max_capacity(group.size()), 32 << 20)
    wrong = torch.zeros((), dtype=torch.int64, device=gpu.device())
    bursts, before = 0, 0
    custom_ops.reset_launches()
    deadline, go_on = time.monotonic() + seconds, torch.ones((), device=gpu.device())
    while go_on.item():
        one_shot = choice.random() < 0.5
        state.limit_to(Limits(most if one_shot else 0, most, "soak"))
        hidden, dtype, format = choice.choice(HIDDEN), choice.choice(DTYPES), choice.choice(FORMATS)
        tokens = max(1, int(2 ** choice.uniform(0, 10)))
        wrong += burst(tokens, hidden, dtype, format, choice.randrange(1 << 30))
        bursts += 1
        if bursts == 200:
            before = in_use()
        go_on.fill_(time.monotonic() < deadline or bursts <= 200)
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
    state.limit_to(usual)
    strategies: dict[str, int] = {}
    for launch, count in custom_ops.launches().items():
        strategies[launch.strategy.value] = strategies.get(launch.strategy.value, 0) + count
    return Soaked(sum(strategies.values()), strategies, int(wrong.item()), before, in_use())


def burst(tokens: int, hidden: int, dtype: torch.dtype, format: str | None, seed: int) -> torch.Tensor:
    """Wrong values of eight calls in a row on one kind of tensors."""
    one = case(tokens, hidden, dtype=dtype, seed=seed)
    quantisation = None if format is None else quantisation_of(format)
    if quantisation and domain.shape_refusal(hidden, dtype, dist.get_world_size(), quantisation):
        format = quantisation = None
    code = pattern_codes.find(quantisation.format.name if quantisation else None, norm_out=True).code
    scale = torch.full((1,), 0.037, device=gpu.device())
    reduced = one.x.clone()
    dist.all_reduce(reduced)
    expected = reduced + one.residual
    wrong = torch.zeros((), dtype=torch.int64, device=gpu.device())
    results = []
    for _ in range(8):
        norm, total = one.outputs()
        written = Outputs(format, (tokens, hidden), "cuda") if format else None
        gpu.OP(
            one.x, one.residual, one.gamma, EPS, dist.get_world_size(), True, True, 0, code, norm,
            residual_out=total, scale_factor=scale if quantisation and quantisation.format.takes_scale else None,
            **(written.tensors if written else {}), **(CASES[format] if format else {}),
        )  # fmt: skip
        results.append((norm, total, written))
    for norm, total, written in results:
        wide = expected.double()
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * one.gamma.double()
        slack = 2 * torch.finfo(dtype).eps * exact.abs() + 1e-6
        wrong += (total != expected).sum() + (~((norm.double() - exact).abs() <= slack)).sum()
        if written and quantisation:
            values, _ = reference_quant.quantise(norm, quantisation, scale[0])
            wrong += (raw(written.tensors["quant_out"]) != raw(values)).sum()
    return wrong


def in_use() -> int:
    """Bytes of the device that are taken, by torch's allocator or by workspaces."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    return whole - free


def test_soak(gpus: Ranks) -> None:
    for found in gpus.run(soak, SECONDS, 0, timeout=SECONDS + 300):
        print(found)
        assert found.wrong == 0
        assert {"one_shot", "two_shot"} <= set(found.strategies)
        assert found.calls >= 1600
        assert found.after <= found.before + (64 << 20), "memory does not grow"
