"""The fused op on real GPUs against NCCL, an addition and a float64 norm: eager, compiled, and under CUDA graphs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import custom_ops
import fusion_passes
from custom_ops import limits, workspace
from custom_ops.limits import Strategy
from fusion_passes import compat
from tests.support import gpu
from tests.support.gpu import EPS, Case, case
from tests.support.ranks import Ranks
from tests.support.ulp import distance

HIDDEN = (1024, 2880, 4096, 7168, 8192)
DTYPES = (torch.bfloat16, torch.float16)

Summary = dict[str, int]


ABOVE = "message above the limit of this device and world size"


def eager(hidden: int, dtype: torch.dtype) -> tuple[Summary, int]:
    counts = gpu.token_counts(hidden)
    for tokens in counts:
        one = case(tokens, hidden, dtype=dtype, seed=tokens)
        for residual in (True, False):
            outputs = one.outputs()
            one.call(*outputs, residual=residual)
            one.check(*outputs, residual=residual)
    return gpu.ran(), sum(tokens > gpu.limit(hidden) for tokens in counts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_eager(gpus: Ranks, hidden: int, dtype: torch.dtype) -> None:
    for summary, above in gpus.run(eager, hidden, dtype):
        assert summary["one_shot, early trigger"] > 0
        assert summary[ABOVE] == 2 * above, "with and without a residual"


def captured(hidden: int, dtype: torch.dtype) -> Summary:
    for tokens in gpu.token_counts(hidden):
        one = case(tokens, hidden, dtype=dtype, seed=tokens)
        outputs = one.outputs()
        one.call(*outputs)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            one.call(*outputs)
        for seed in (1, 2):
            fresh = case(tokens, hidden, dtype=dtype, seed=seed)
            for mine, new in ((one.x, fresh.x), (one.residual, fresh.residual), (one.gamma, fresh.gamma)):
                mine.copy_(new)
            for output in outputs:
                output.fill_(float("nan"))
            graph.replay()
            one.check(*outputs)
    return gpu.ran()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_cuda_graph(gpus: Ranks, hidden: int, dtype: torch.dtype) -> None:
    gpus.run(captured, hidden, dtype)


def compiled(hidden: int, dtype: torch.dtype, mode: str | None, dynamic: bool) -> tuple[Summary, list[str]]:
    world = dist.group.WORLD
    norm = torch.nn.RMSNorm(hidden, EPS, device=gpu.device(), dtype=dtype)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + funcol.all_reduce(x, "sum", world)  # type: ignore[arg-type]
        return norm(total), total

    with (
        torch.inference_mode(),
        compat.without_caches(),
        fusion_passes.enabled(),
        # Every count of tokens may be a compilation of its own.
        torch._dynamo.config.patch(recompile_limit=64),
    ):
        fn = torch.compile(block, fullgraph=True, mode=mode, dynamic=dynamic)
        for tokens in gpu.token_counts(hidden):
            for seed in range(3 if mode else 1):
                one = case(tokens, hidden, dtype=dtype, seed=seed)
                norm.weight.copy_(one.gamma)
                normed, total = fn(one.x, one.residual)
                # What is left alone is Inductor's: it takes the norm of the residual before that is rounded.
                fused = dynamic or fusion_passes.report()[-1].fused
                one.check(normed.clone(), total.clone(), bound=0.51 if fused else 3.0)
    return gpu.ran(), [site.rule or str(site.reason) for site in fusion_passes.report()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_compiled_with_dynamic_shapes(gpus: Ranks, hidden: int, dtype: torch.dtype) -> None:
    for summary, verdicts in gpus.run(compiled, hidden, dtype, None, True):
        assert set(verdicts) == {"add_norm"}
        assert summary[ABOVE] >= 1


def test_compiled_with_static_shapes(gpus: Ranks) -> None:
    for _, verdicts in gpus.run(compiled, 4096, torch.bfloat16, None, False, timeout=240):
        assert verdicts.count("add_norm") >= 9
        assert [verdict for verdict in verdicts if verdict != "add_norm"] == [verdicts[-1]]
        assert verdicts[-1].startswith("above_limit: 4097 tokens"), "one token too many stays stock"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_reduce_overhead(gpus: Ranks, hidden: int, dtype: torch.dtype) -> None:
    for _, verdicts in gpus.run(compiled, hidden, dtype, "reduce-overhead", True, timeout=240):
        assert set(verdicts) == {"add_norm"}


def shapes() -> None:
    for shape in [(4096,), (2, 3, 4096), (2, 2, 2, 576)]:
        one = case(*shape)
        outputs = one.outputs()
        one.call(*outputs)
        one.check(*outputs)
    one = case(6, 8, 1024)
    transposed = Case(one.x.transpose(0, 1).contiguous().transpose(0, 1), one.residual, one.gamma)
    outputs = one.outputs()
    transposed.call(*outputs)
    one.check(*outputs)
    one.check(*_aliased(one))


def _aliased(one: Case) -> tuple[Tensor, Tensor]:
    copy = Case(one.x.clone(), one.residual.clone(), one.gamma)
    copy.call(copy.x, copy.residual)
    return copy.x, copy.residual


def test_ranks_layouts_and_outputs_that_are_inputs(gpus: Ranks) -> None:
    gpus.run(shapes)


def float32() -> None:
    for tokens in (1, 17, 300):
        one = case(tokens, 4096, dtype=torch.float32)
        outputs = one.outputs()
        one.call(*outputs)
        one.check(*outputs)


def test_float32(gpus: Ranks) -> None:
    gpus.run(float32)


def weights() -> None:
    one = case(5, 4096)
    shifted = Case(one.x, one.residual, (1e-3 * one.gamma.float()).bfloat16())
    outputs = one.outputs()
    shifted.call(*outputs, weight_bias=1.0)
    Case(one.x, one.residual, 1 + shifted.gamma.double()).check(*outputs)  # type: ignore[arg-type]
    norm, total = one.outputs()
    gpu.OP(one.x, one.residual, None, EPS, dist.get_world_size(), True, True, 0, 1, norm, residual_out=total)
    Case(one.x, one.residual, torch.ones_like(one.gamma)).check(norm, total)


def test_weight_bias_and_no_weight(gpus: Ranks) -> None:
    gpus.run(weights)


def two_shot() -> None:
    state = workspace.state_of(dist.group.WORLD, gpu.device())  # type: ignore[arg-type]
    usual = state.limits
    state.limit_to(limits.Limits(0, 32 << 20, "test"))
    try:
        for tokens in (1, dist.get_world_size(), dist.get_world_size() + 1, 128, 1001):
            for hidden in (1792, 2880, 4096):
                one = case(tokens, hidden)
                custom_ops.reset_launches()
                outputs = one.outputs()
                one.call(*outputs)
                one.check(*outputs)
                (launch,) = custom_ops.launches()
                expected = Strategy.TWO_SHOT if tokens > dist.get_world_size() else Strategy.UNFUSED
                assert launch.strategy is expected
                assert launch.completion_at_end is True
    finally:
        state.limit_to(usual)


def test_two_shot(gpus: Ranks) -> None:
    gpus.run(two_shot)


def outside_of_the_domain() -> Summary:
    for hidden in (1000, 1028, 8 * 1031):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for residual in (True, False):
                one = case(33, hidden, dtype=dtype)
                outputs = one.outputs()
                one.call(*outputs, residual=residual)
                one.check(*outputs, residual=residual)
    one = case(33, 1024)
    custom = one.outputs()
    one.call(*custom, residual=False)
    return gpu.ran()


def test_unfused_outside_of_the_domain(gpus: Ranks) -> None:
    for summary in gpus.run(outside_of_the_domain):
        assert any("hidden size 1028" in reason for reason in summary)
        assert any("1031 threads" in reason for reason in summary)


def unfused_in_place() -> None:
    one = case(33, 1028)
    one.check(*_aliased(one))
    swapped = Case(one.x.clone(), one.residual.clone(), one.gamma)
    swapped.call(swapped.residual, swapped.x)
    one.check(swapped.residual, swapped.x)


def test_unfused_with_outputs_that_are_inputs(gpus: Ranks) -> None:
    gpus.run(unfused_in_place)


def pattern_0() -> None:
    one = case(5, 4096)
    for residual in (one.residual, None):
        out = one.outputs()[0]
        gpu.OP(one.x, residual, None, 0.0, dist.get_world_size(), True, True, 0, 0, residual_out=out)
        expected = one.x.clone()
        dist.all_reduce(expected)
        assert torch.equal(out, expected if residual is None else expected + residual) or dist.get_world_size() > 2


def test_pattern_0(gpus: Ranks) -> None:
    gpus.run(pattern_0)


def plain() -> Summary:
    for hidden in (1024, 1028, 4096):
        for tokens in gpu.token_counts(hidden):
            one = case(tokens, hidden)
            out = torch.ops.custom_ops.flashinfer_all_reduce(one.x)
            expected = one.x.clone()
            dist.all_reduce(expected)
            assert torch.equal(out, expected) or dist.get_world_size() > 2
    whole = torch.arange(12, device=gpu.device())
    assert torch.equal(torch.ops.custom_ops.flashinfer_all_reduce(whole), whole * dist.get_world_size())
    return gpu.ran()


def test_plain_all_reduce(gpus: Ranks) -> None:
    for summary in gpus.run(plain):
        assert summary["one_shot, early trigger"] > 0
        assert summary["one_shot, late trigger"] > 0
        assert any("int64" in reason for reason in summary)


def deterministic(hidden: int) -> Summary:
    """Rows alone, in pairs and in one batch give the same bits; so does each of three runs."""
    torch.use_deterministic_algorithms(True)
    try:
        one = case(48, hidden)
        norm, total = one.outputs()
        one.call(norm, total)
        one.check(norm, total)
        for size in (1, 2, 17, 48):
            for start in range(0, 48 - size + 1, size):
                rows = slice(start, start + size)
                part = Case(one.x[rows], one.residual[rows], one.gamma)
                for _ in range(3):
                    outputs = part.outputs()
                    part.call(*outputs)
                    assert torch.equal(outputs[0], norm[rows]), f"norm of {size} rows"
                    assert torch.equal(outputs[1], total[rows]), f"sum of {size} rows"
        return gpu.ran()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("hidden", [2048, 4096, 7168])
def test_deterministic_rows_do_not_depend_on_the_batch(gpus: Ranks, hidden: int) -> None:
    gpus.run(deterministic, hidden)


def special(one_shot: bool) -> None:
    """Zeros and subnormal numbers of both signs, infinities, NaN and outliers, each in a row of its own."""
    state = workspace.state_of(dist.group.WORLD, gpu.device())  # type: ignore[arg-type]
    before = state.limits
    most = 32 << 20
    state.limit_to(limits.Limits(most if one_shot else 0, most, "test"))
    tiny = torch.finfo(torch.bfloat16).smallest_normal / 4
    values = (0.0, -0.0, tiny, -tiny, float("inf"), float("-inf"), float("nan"), 1e5, -1e5, 3e38)
    plain = case(2 * len(values), 4096)
    outputs = plain.outputs()
    plain.call(*outputs)
    odd = Case(plain.x.clone(), plain.residual.clone(), plain.gamma)
    for row, value in enumerate(values):
        odd.x[2 * row, row] = value
        odd.residual[2 * row, row + 100] = value
    norm, total = odd.outputs()
    odd.call(norm, total)
    for row in range(1, 2 * len(values), 2):
        assert torch.equal(norm[row], outputs[0][row]), "the rows between are as they were"
        assert torch.equal(total[row], outputs[1][row])
    reduced = odd.x.clone()
    dist.all_reduce(reduced)
    expected = reduced + odd.residual
    assert torch.equal(total.isnan(), expected.isnan())
    assert torch.equal(total.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
    wide = expected.double()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + gpu.EPS) * odd.gamma.double()
    finite = wide.isfinite().all(-1) & (wide.abs().amax(-1) < 1e19)
    found = distance(norm[finite], exact[finite], exact[finite], norm.dtype)
    assert found <= 0.51, found
    assert norm[~finite].isnan().any(-1).sum() >= 3, "infinities and NaN show"
    state.limit_to(before)


@pytest.mark.parametrize("one_shot", [True, False])
def test_special_values_disturb_no_other_row(gpus: Ranks, one_shot: bool) -> None:
    gpus.run(special, one_shot)
