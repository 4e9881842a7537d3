"""Real models: the exact verdict for every all-reduce, and values against the same model without the pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.support.agreement import with_eager
from tests.support.capture import Captured, capture
from tests.support.models import GPT_OSS_PLAN, SCALED_EMBEDDING, hugging_face, knows_plans, parallel_llama, token_ids
from tests.support.ranks import Ranks

DENSE = ["norm", *["add_norm"] * 4]
"""The embedding feeds a norm directly; attention and MLP of both layers are added to the residual first."""

SANDWICH = ["norm"] * 5
"""Gemma 2 and 3 norm the sum before they add it."""

EXPECTED = {
    "llama": DENSE,
    "qwen3": DENSE,
    "mistral": DENSE,
    "mixtral": DENSE,
    # Gemma scales its embedding before the norm.
    "gemma2": [SCALED_EMBEDDING, *SANDWICH[1:]],
    "gemma3": [SCALED_EMBEDDING, *SANDWICH[1:]],
    # The dense layer's MLP fuses; attention is not sharded; in the MoE layer the sums of routed and shared experts are
    # added to each other before the residual, and one norm takes one of them.
    "deepseek_v3": ["norm", "add_norm", "norm_shared", "folded_add_norm"],
    # transformers' own plan shards the embedding alone.
    "gpt_oss": ["norm"],
}


def run(model: nn.Module, ids: Tensor, **options: bool) -> Captured:
    return capture(lambda ids: model(ids, use_cache=False).logits, ids, **options)  # type: ignore[arg-type]


@knows_plans
@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", EXPECTED)
def test_hugging_face(name: str, dynamic: bool) -> None:
    captured = run(hugging_face(name), token_ids(2, 16), dynamic=dynamic)
    assert captured.rules == EXPECTED[name], captured.sites
    assert len(captured.before) == 1, "one graph"
    left = sum(not site.fused for site in captured.sites)
    assert captured.after[0].count("= _c10d_functional.all_reduce(") == left
    assert captured.after[0].count("call_trtllm_fused_allreduce_norm") == len(captured.rules) - left


@knows_plans
@pytest.mark.usefixtures("fake_group")
def test_gpt_oss_with_a_plan_that_shards_attention() -> None:
    captured = run(hugging_face("gpt_oss", GPT_OSS_PLAN), token_ids(2, 16))
    # o_proj has a bias, which is added to the sum before the residual is.
    assert captured.rules == ["norm", "folded_add_norm", "folded_add_norm"]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("shape", [(16,), (2, 16)], ids=["2-D", "3-D"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_parallelize_module(shape: tuple[int, ...], dynamic: bool) -> None:
    captured = capture(parallel_llama(), token_ids(*shape), dynamic=dynamic)
    assert captured.rules == DENSE
    assert "all_reduce(" not in captured.after[0]
    modules = [site.module for site in captured.sites]
    assert modules[0] == "embedding"
    assert modules[1:] == [f"layers.{layer}.{part}" for layer in (0, 1) for part in ("attention.o", "mlp.down")]


@pytest.mark.usefixtures("fake_group")
def test_marked_dynamic() -> None:
    ids = token_ids(2, 16)
    torch._dynamo.mark_dynamic(ids, 0)
    torch._dynamo.mark_dynamic(ids, 1)
    assert capture(parallel_llama(), ids).rules == DENSE


@pytest.mark.usefixtures("fake_group")
def test_training_is_left_alone() -> None:
    captured = capture(parallel_llama(), token_ids(2, 16), no_grad=False)
    assert captured.rules == ["training_graph"] * 5
    assert captured.after == captured.before


def values(name: str) -> tuple[list[str], float]:
    """(rules, share of tokens whose logits are all close to eager's)."""
    model = parallel_llama() if name == "by hand" else hugging_face(name)
    ids = token_ids(2, 16)

    def logits(ids: Tensor) -> Tensor:
        return model(ids) if name == "by hand" else model(ids, use_cache=False).logits

    captured, difference = with_eager(logits, ids)
    # A few ulp of bfloat16 (2^-8) after two layers and the head.
    return captured.rules, (difference < 0.08).float().mean().item()


@pytest.mark.parametrize("name", ["by hand", *(pytest.param(name, marks=knows_plans) for name in EXPECTED)])
def test_values_against_eager(ranks: Ranks, name: str) -> None:
    for rules, close in ranks.run(values, name):
        assert rules == EXPECTED.get(name, DENSE)
        # A router may send a token to another expert for the last bit of its norm.
        assert close >= (0.9 if name == "mixtral" else 1.0)
