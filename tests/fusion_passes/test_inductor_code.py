"""The code that Inductor writes for a rewritten graph: one call of the op, on its buffers, and nothing beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import fusion_passes
from fusion_passes import FusionConfig, compat
from fusion_passes.spare import is_spare
from tests.fusion_passes.test_steps import bias, bias_alone, multiplier, second_sum
from tests.support.models import parallel_llama, token_ids
from tests.support.programs import HIDDEN, NORMS, reduce, tensors
from tests.support.quant_programs import SPELLINGS, Quantised

pytestmark = pytest.mark.usefixtures("fake_group")
CALL = "torch.ops.custom_ops.call_trtllm_fused_allreduce_norm.default("


def code_of(fn: object, *inputs: Tensor, config: FusionConfig | None = None, **options: object) -> str:
    """The body of the compiled function."""
    with torch.no_grad(), compat.without_caches():
        compiled = torch.compile(fn, fullgraph=True, options=fusion_passes.options(config), **options)  # type: ignore[call-overload]
        _, code = run_and_get_code(compiled, *inputs)
    (text,) = code
    return text[text.index("def call(") : text.index("def get_args")]


def test_one_call_and_no_copy() -> None:
    norm, proj = NORMS["hugging_face_llama"](), torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + reduce(proj(x))
        return norm(total), total

    text = code_of(block, *tensors(2, 8, HIDDEN))
    assert text.count(CALL) == 1
    assert "_c10d_functional" not in text
    for unwanted in ("copy_", "clone", "cpp_fused", "async_compile"):
        assert unwanted not in text, unwanted
    # The product is reduced from where it was written, and both outputs are returned as they are.
    call = next(line for line in text.splitlines() if CALL in line)
    assert call.strip().startswith(f"{CALL}reinterpret_tensor(buf0, (2, 8, {HIDDEN})")
    assert "return (buf1, buf2, )" in text


def test_stack_of_layers_has_no_copy_either() -> None:
    text = code_of(parallel_llama(), token_ids(2, 16))
    assert text.count(CALL) == 5
    assert "_c10d_functional" not in text
    assert "copy_" not in text
    assert "clone" not in text


def test_transposed_input_is_made_contiguous_by_inductor() -> None:
    norm = NORMS["meta"]()

    def block(x: Tensor, residual: Tensor) -> Tensor:
        return norm(residual.transpose(0, 1) + reduce(x.sin().transpose(0, 1)))

    x, residual = tensors(2, 8, HIDDEN)
    text = code_of(block, x, residual)
    call = next(line for line in text.splitlines() if CALL in line)
    contiguous = f"empty_strided_cpu((8, 2, {HIDDEN}), ({2 * HIDDEN}, {HIDDEN}, 1)"
    first, second = call[call.index(CALL) + len(CALL) :].split(", ")[:2]
    for buffer in (first, second):
        assert f"{buffer} = {contiguous}" in text, "laid out as [tokens, hidden] before the call"


@pytest.mark.parametrize("program", [bias, bias_alone, multiplier, second_sum], ids=lambda program: program.__name__)
def test_what_is_folded_costs_one_kernel_and_no_copy(program: Callable[..., Tensor]) -> None:
    text = code_of(program, *tensors(2, 8, HIDDEN))
    assert text.count(CALL) == 1
    assert text.count("cpp_fused") == (2 if program is second_sum else 1), "second_sum also takes a sine"
    assert "copy_" not in text
    assert "clone" not in text


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", [name for name in SPELLINGS if name.startswith("own")])
def test_quantised_outputs_are_written_in_place(name: str, dynamic: bool) -> None:
    spelling = SPELLINGS[name]
    module, inputs = Quantised(spelling.quantise), (*tensors(2, 5, HIDDEN), *spelling.scales)
    text = code_of(module, *inputs, dynamic=dynamic)
    assert text.count(CALL) == 1
    for unwanted in ("copy_", "clone", "_quant.", "_quant("):
        assert unwanted not in text, unwanted


PATHS = {"fused": CALL, "overlap": "torch.ops.custom_ops.flashinfer_all_reduce_.default("}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("product", [True, False])
def test_unknown_size_is_reduced_where_it_lies(path: Any, product: bool) -> None:
    """Above the limit the op is the process group's all-reduce, which in stock needs no copy of a product either."""
    norm, proj = NORMS["meta"](), torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + reduce(proj(x) if product else x.sin())
        return norm(total), total

    text = code_of(block, *tensors(2, 8, HIDDEN), config=FusionConfig(norm_path=path), dynamic=True)
    (call,) = (line for line in text.splitlines() if PATHS[path] in line)
    assert call.count("buf0") == (2 if path == "fused" else 1)
    for unwanted in ("copy_(", "clone", "_c10d_functional", "flashinfer_all_reduce.default"):
        assert unwanted not in text, unwanted


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kept", ["input", "used", "view", "clone"])
def test_what_is_needed_otherwise_is_not_written_over(path: Any, kept: str) -> None:
    norm, proj = NORMS["meta"](), torch.nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        made = {"input": lambda: x, "used": lambda: proj(x), "view": lambda: x.view(-1, 16, HIDDEN), "clone": x.clone}[
            kept
        ]()
        total = residual.view(made.shape) + reduce(made)
        return norm(total), total, made * 2

    inputs = tensors(2, 16, HIDDEN)
    before = [one.clone() for one in inputs]
    text = code_of(block, *inputs, config=FusionConfig(norm_path=path), dynamic=True)
    assert all(torch.equal(one, copy) for one, copy in zip(inputs, before, strict=True))
    assert ("flashinfer_all_reduce.default(" if path == "overlap" else CALL) in text
    with torch.no_grad(), compat.without_caches():
        options = fusion_passes.options(FusionConfig(norm_path=path))
        *_, doubled = torch.compile(block, fullgraph=True, dynamic=True, options=options)(*inputs)
        *_, expected = block(*inputs)
    torch.testing.assert_close(doubled, expected, rtol=0.02, atol=0.02)


def test_only_memory_of_its_own_is_spare() -> None:
    graph = torch.fx.Graph()
    x, user = graph.placeholder("x"), None
    made = {
        "fresh": graph.call_function(torch.ops.aten.mul.Tensor, (x, 2)),
        "in place": graph.call_function(torch.ops.aten.mul_.Tensor, (x, 2)),
        "clone": graph.call_function(torch.ops.aten.clone.default, (x,)),
        "view": graph.call_function(torch.ops.aten.view.default, (x, [16])),
        "input": x,
    }
    for node in made.values():
        node.meta["val"] = torch.empty(16)
        user = graph.call_function(torch.ops.aten.sin.default, (node,))
    assert user is not None
    found = {name for name, node in made.items() if is_spare(node, list(node.users)[-1])}
    assert found == {"fresh"}
