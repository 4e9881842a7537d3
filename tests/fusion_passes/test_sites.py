"""What may stand around a norm, and what may not: the verdict, and a graph that is untouched where it is a no."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import fusion_passes
from fusion_passes import FusionConfig
from tests.support.capture import Captured, capture
from tests.support.programs import HIDDEN, NORMS, AddNorm, JustNorm, reduce, tensors

pytestmark = pytest.mark.usefixtures("fake_group")

OP = "call_trtllm_fused_allreduce_norm"


def llama() -> nn.Module:
    return NORMS["hugging_face_llama"]()


def linear() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)


def assert_fused(captured: Captured, *rules: str) -> None:
    """Exactly these rules, one op each, and no all-reduce or wait left."""
    assert captured.rules == list(rules), captured.sites
    text = captured.after[0]
    assert text.count(OP) == len(rules)
    assert "c10d" not in text


def assert_untouched(captured: Captured, *codes: str) -> None:
    """Exactly these reasons, and the graph as it was."""
    assert captured.rules == list(codes), captured.sites
    assert captured.after == captured.before
    assert all(site.reason is not None and site.reason.text for site in captured.sites)


def test_residual_in_either_order() -> None:
    norm = llama()
    x, residual = tensors(2, 8, HIDDEN)
    assert_fused(capture(lambda x, r: norm(r + reduce(x)), x, residual), "add_norm")
    assert_fused(capture(lambda x, r: norm(reduce(x) + r), x, residual), "add_norm")


def test_in_place_collective_and_in_place_add() -> None:
    norm, proj = llama(), linear()

    def block(x: Tensor, residual: Tensor) -> Tensor:
        y = proj(x)
        dist.all_reduce(y)
        residual = residual.clone()
        residual += y
        return norm(residual)

    assert_fused(capture(block, *tensors(2, 8, HIDDEN)), "add_norm")


def test_reshape_between_sum_and_add() -> None:
    norm = llama()
    x, residual = tensors(16, HIDDEN, count=1)[0], tensors(2, 8, HIDDEN, count=1)[0]
    captured = capture(lambda x, r: norm(r + reduce(x).view(2, 8, HIDDEN)), x, residual)
    assert_fused(captured, "add_norm")
    assert "reshape" not in captured.after[0]


def test_reshape_between_add_and_norm() -> None:
    norm = llama()
    captured = capture(lambda x, r: norm((r + reduce(x)).view(-1, HIDDEN)), *tensors(2, 8, HIDDEN))
    assert_fused(captured, "add_norm")
    assert captured.result.shape == (16, HIDDEN)


def test_reshapes_everywhere_with_unknown_sizes() -> None:
    norm = llama()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + reduce(x.flatten(0, 1)).view_as(residual)
        return norm(total.flatten(0, 1)), total

    x, residual = tensors(2, 8, HIDDEN)
    for tensor in (x, residual):
        torch._dynamo.mark_dynamic(tensor, 0)
        torch._dynamo.mark_dynamic(tensor, 1)
    captured = capture(block, x, residual)
    assert_fused(captured, "add_norm")
    call = captured.after[0].replace("pdl_advance_launch_tokens=16", "")
    assert not re.search(r"\b(2|8|16)\b", call.split("world_size=2")[0]), "a size of the example in the graph"


def test_no_residual_and_sum_used_later() -> None:
    norm = llama()
    (x,) = tensors(2, 8, HIDDEN, count=1)

    def embedding(x: Tensor) -> tuple[Tensor, Tensor]:
        total = reduce(x)
        return norm(total), total * 2

    assert_fused(capture(embedding, x), "norm")


def test_no_residual_behind_a_reshape() -> None:
    norm = llama()
    (x,) = tensors(16, HIDDEN, count=1)
    assert_fused(capture(lambda x: norm(reduce(x).view(2, 8, HIDDEN)), x), "norm")


def test_sandwich() -> None:
    first, second = llama(), llama()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = residual + first(reduce(x))
        return second(residual), residual

    captured = capture(block, *tensors(2, 8, HIDDEN))
    assert_fused(captured, "norm")
    assert captured.after[0].count("= rsqrt(") == 1, "the second norm has no all-reduce of its own"


def test_residual_not_used_later() -> None:
    norm = llama()
    assert_fused(capture(lambda x, r: norm(r + reduce(x)), *tensors(2, 8, HIDDEN)), "add_norm")


def test_norm_output_with_many_users() -> None:
    norm, q, k, v = llama(), linear(), linear(), linear()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        total = residual + reduce(x)
        normed = norm(total)
        return q(normed), k(normed), v(normed), normed, total

    assert_fused(capture(block, *tensors(2, 8, HIDDEN)), "add_norm")


def test_layers_follow_each_other() -> None:
    norms, projections = [llama() for _ in range(4)], [linear() for _ in range(4)]

    def stack(x: Tensor) -> Tensor:
        residual = reduce(x)
        normed = norms[0](residual)
        for norm, proj in zip(norms[1:], projections, strict=False):
            residual = residual + reduce(proj(normed))
            normed = norm(residual)
        return normed

    (x,) = tensors(2, 8, HIDDEN, count=1)
    assert_fused(capture(stack, x), "norm", "add_norm", "add_norm", "add_norm")


def test_value_of_an_inner_node_used_elsewhere() -> None:
    (x, residual), weight = tensors(2, 8, HIDDEN), NORMS["meta"]().weight

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = (residual + reduce(x)).float()
        scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (total * scale).to(torch.bfloat16) * weight, scale

    captured = capture(block, x, residual)
    assert_fused(captured, "add_norm")
    assert captured.after[0].count("= rsqrt(") == 1, "the scale itself is still computed, from the residual of the op"


def test_gate_behind_the_norm() -> None:
    norm = NORMS["no_weight"]()
    captured = capture(lambda x, r, g: norm(r + reduce(x)) * g, *tensors(2, 8, HIDDEN, count=3))
    assert_fused(captured, "add_norm")


def test_two_norms_of_one_residual() -> None:
    first, second = llama(), NORMS["gemma"]()

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + reduce(x)
        return first(total), second(total)

    captured = capture(block, *tensors(2, 8, HIDDEN))
    assert_fused(captured, "add_norm")
    assert captured.after[0].count("= rsqrt(") == 1


def test_other_group() -> None:
    group = dist.new_group([0, 1])
    norm = llama()
    captured = capture(
        lambda x, r: norm(r + funcol.all_reduce(x, "sum", group)),  # type: ignore[arg-type]
        *tensors(2, 8, HIDDEN),
    )
    assert_fused(captured, "add_norm")
    assert f"group_name='{group.group_name}'" in captured.after[0]


def test_weight_computed_behind_the_add() -> None:
    weight = NORMS["meta"]().weight

    def block(x: Tensor, residual: Tensor) -> Tensor:
        total = residual + reduce(x)
        shifted = weight + 1
        return torch.nn.functional.rms_norm(total, (HIDDEN,), shifted, 1e-5)

    assert_fused(capture(block, *tensors(2, 8, HIDDEN)), "add_norm")


def test_two_sums_in_one_add_fuse_the_later() -> None:
    norm = llama()
    captured = capture(lambda x, y: norm(reduce(x) + reduce(y)), *tensors(2, 8, HIDDEN))
    assert captured.rules == ["norm_shared", "add_norm"]
    assert captured.after[0].count("all_reduce.") + captured.after[0].count("all_reduce(") == 1


def test_flag_off_leaves_the_text_identical() -> None:
    captured = capture(AddNorm(llama()), *tensors(2, 8, HIDDEN), config=FusionConfig(fuse_allreduce_rms=False))
    assert_untouched(captured, "disabled")


def test_training_graph() -> None:
    captured = capture(AddNorm(llama()), *tensors(2, 8, HIDDEN), no_grad=False)
    assert_untouched(captured, "training_graph")


def test_exact_rounding_leaves_what_rounds_elsewhere() -> None:
    config = FusionConfig(exact_rounding=True)
    assert_untouched(capture(AddNorm(llama()), *tensors(2, 8, HIDDEN), config=config), "rounding")
    assert_fused(capture(AddNorm(NORMS["gpt_oss"]()), *tensors(2, 8, HIDDEN), config=config), "add_norm")


def test_more_tokens_than_max_token_num() -> None:
    x, residual = tensors(2, 8, HIDDEN)
    assert_untouched(capture(AddNorm(llama()), x, residual, config=FusionConfig(max_token_num=15)), "max_token_num")
    captured = capture(AddNorm(llama()), x, residual, config=FusionConfig(max_token_num=16))
    assert_fused(captured, "add_norm")
    assert "max_token_num=16" in captured.after[0]


Program = Callable[..., Any]


def average(x: Tensor, r: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(r + reduce(x, "avg"), (HIDDEN,))


def float32_reduction(x: Tensor, r: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(r + reduce(x.float()).to(torch.bfloat16), (HIDDEN,))


def float32_residual(x: Tensor, r: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(r.float() + reduce(x), (HIDDEN,))


def scaled_add(x: Tensor, r: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(torch.add(r, reduce(x), alpha=2), (HIDDEN,))


def sum_used(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    total = reduce(x)
    return torch.nn.functional.rms_norm(r + total, (HIDDEN,)), total


def reduces_its_input(x: Tensor, r: Tensor) -> Tensor:
    dist.all_reduce(x)
    return torch.nn.functional.rms_norm(r + x, (HIDDEN,))


def doubled(x: Tensor, r: Tensor) -> Tensor:
    total = reduce(x)
    return torch.nn.functional.rms_norm(total + total, (HIDDEN,))


def coalesced(x: Tensor, r: Tensor) -> Tensor:
    (total,) = funcol.all_reduce_coalesced([x], "sum", dist.group.WORLD)  # type: ignore[arg-type]
    return torch.nn.functional.rms_norm(r + total, (HIDDEN,))


def no_norm(x: Tensor, r: Tensor) -> Tensor:
    return (r + reduce(x)).sin() @ r[0].T


def graph_ends(x: Tensor, r: Tensor) -> Tensor:
    return r + reduce(x)


def graph_ends_without_add(x: Tensor, r: Tensor) -> Tensor:
    return reduce(x)


def nonlinear(x: Tensor, r: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(r + reduce(x).sin(), (HIDDEN,))


def gate(x: Tensor, r: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(r + reduce(x) * r.sigmoid(), (HIDDEN,))


def heads(x: Tensor, r: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm((r + reduce(x)).view(2, 8, 4, 16), (16,))


def float32_weight(x: Tensor, r: Tensor) -> Tensor:
    total = r + reduce(x)
    scale = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return (total.float() * scale * r[0, 0].sin().float().exp()).to(total.dtype)


def weight_depends_on_the_sum(x: Tensor, r: Tensor) -> Tensor:
    total = r + reduce(x)
    return torch.nn.functional.rms_norm(total, (HIDDEN,), total[0, 0])


def epsilon_is_infinite(x: Tensor, r: Tensor) -> Tensor:
    total = (r + reduce(x)).float()
    return (total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + float("inf"))).to(x.dtype)


REFUSED: dict[Program, str] = {
    average: "reduce_op",
    float32_reduction: "cast_between",
    float32_residual: "residual_mismatch",
    scaled_add: "other_between",
    sum_used: "sum_used",
    reduces_its_input: "written_back",
    doubled: "other_between",
    coalesced: "collective_form",
    no_norm: "no_norm",
    graph_ends: "graph_ends",
    graph_ends_without_add: "graph_ends",
    nonlinear: "other_between",
    gate: "scale_between",
    heads: "other_between",
    float32_weight: "weight_mismatch",
    weight_depends_on_the_sum: "weight_depends",
    epsilon_is_infinite: "eps",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_refused_with_a_reason_and_untouched(program: Program) -> None:
    assert_untouched(capture(program, *tensors(2, 8, HIDDEN)), REFUSED[program])


def test_unknown_and_single_rank_groups() -> None:
    alone = dist.new_group([0])
    norm = llama()

    def block(x: Tensor, residual: Tensor) -> Tensor:
        return norm(residual + funcol.all_reduce(x, "sum", alone))  # type: ignore[arg-type]

    assert_untouched(capture(block, *tensors(2, 8, HIDDEN)), "single_rank")


def test_symbolic_hidden_size() -> None:
    x, residual = tensors(2, 8, HIDDEN)
    for tensor in (x, residual):
        torch._dynamo.mark_dynamic(tensor, 2)
    captured = capture(lambda x, r: torch.nn.functional.rms_norm(r + reduce(x), (x.shape[-1],)), x, residual)
    assert_fused(captured, "add_norm")


def test_every_all_reduce_has_a_verdict_with_its_place() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([AddNorm(llama()), JustNorm(llama())])

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            normed, residual = self.blocks[0](x, residual)
            return self.blocks[1](normed)[0] + reduce(residual)

    captured = capture(Model(), *tensors(2, 8, HIDDEN))
    assert captured.rules == ["add_norm", "norm", "graph_ends"]
    assert [site.module for site in captured.sites] == ["blocks.0", "blocks.1", ""]
    assert all(site.source.split(":")[0].endswith(("programs.py", "test_sites.py")) for site in captured.sites)
    assert {site.graph for site in captured.sites} == {captured.sites[0].graph}


def test_group_that_is_no_name_is_refused() -> None:
    class Renames(fusion_passes.AllReduceRMSFusionPass):
        def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
            for node in graph.nodes:
                if node.target is torch.ops._c10d_functional.all_reduce.default:
                    node.args = (*node.args[:2], next(iter(graph.nodes)))
            super().__call__(graph, is_inference)
            for node in graph.nodes:
                if node.target is torch.ops._c10d_functional.all_reduce.default:
                    node.args = (*node.args[:2], "0")

    captured = capture(AddNorm(llama()), *tensors(2, 8, HIDDEN), passes=[Renames()])
    assert_untouched(captured, "group_not_static")
