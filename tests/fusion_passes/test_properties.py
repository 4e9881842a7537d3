"""Properties of the pass on random programs: the values stay, the graph stays sound, every all-reduce has a verdict."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor import compile_fx as inductor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_passes import FusionConfig, collectives, graph_text
from fusion_passes.recorder import Recorder
from tests.support import scaling_group
from tests.support.capture import capture
from tests.support.random_programs import Program, programs

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.02}
"""Largest difference as a share of the largest value, by type: roundings grow on their way through a dozen steps."""

TOLERANCE_OF_CODES = 0.3
"""Likewise where values go through float8: one that falls to the other side of a tie is off by an eighth."""


@pytest.fixture(scope="module")
def groups() -> Iterator[list[str]]:
    with scaling_group.groups() as names:
        yield names


def trace(program: Program, groups: list[str], symbolic: bool) -> GraphModule:
    """The program as a graph of the kind that reaches the hook: functional, decomposed, views as reshapes."""
    inputs = program.inputs()

    def run(*inputs: Tensor) -> list[Tensor]:
        return program(groups, list(inputs))

    functional = torch.func.functionalize(run, remove="mutations_and_views")
    gm = make_fx(functional, select_decomp_table(), tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    inductor.view_to_reshape(gm)
    return gm


def execute(gm: GraphModule, program: Program) -> list[Tensor]:
    """What a graph returns, and what it leaves in its inputs."""
    inputs = program.inputs()
    with torch.no_grad():
        return [*gm(*inputs), *inputs]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        scale = b.double().abs().max().clamp_min(1.0)
        assert ((a.double() - b.double()).abs().max() / scale) <= tolerance


def tolerance(program: Program) -> float:
    """That of the type of the fewest digits that a program can round to."""
    if any(step.kind == "quantise" for step in program.steps):
        return TOLERANCE_OF_CODES
    used = {*program.dtypes, *(DTYPE_OF_CAST[step.choice % 3] for step in program.steps if step.kind == "cast")}
    return TOLERANCE[max(used, key=lambda dtype: torch.finfo(dtype).eps)]


DTYPE_OF_CAST = (torch.float32, torch.bfloat16, torch.float16)


SERVED = re.compile("auto_functionalized|flashinfer_all_reduce")


def ops(gm: GraphModule) -> Counter[str]:
    return Counter(
        "all_reduce" if node.target in collectives.TARGETS else "fused"
        for node in gm.graph.nodes
        if node.target in collectives.TARGETS or SERVED.search(str(node.target))
    )


@given(
    program=programs,
    symbolic=st.booleans(),
    reassociate=st.booleans(),
    path=st.sampled_from(["fused", "fused", "auto", "overlap"]),
)
def test_values_stay_and_every_all_reduce_has_a_verdict(
    groups: list[str], program: Program, symbolic: bool, reassociate: bool, path: Any
) -> None:
    gm = trace(program, groups, symbolic)
    before = GraphModule(gm, copy.deepcopy(gm.graph))
    text = graph_text.render(gm.graph)
    config = FusionConfig(reassociate=reassociate, norm_path=path)
    recorder = Recorder(config)
    recorder(gm.graph, True)
    gm.graph.lint()
    gm.recompile()
    sites = recorder.sites
    fused = sum(site.fused for site in sites)
    event(f"fused {min(fused, 3)}")
    event(f"quantised {any('fp8' in (site.rule or '') for site in sites)}")
    assert len(sites) == ops(before)["all_reduce"], "a verdict for every all-reduce"
    assert ops(gm) == Counter({"fused": fused, "all_reduce": len(sites) - fused}) - Counter(), "none lost or doubled"
    if fused:
        assert_close(execute(gm, program), execute(before, program), tolerance(program))
    else:
        assert graph_text.render(gm.graph) == text
    again = Recorder(config)
    again(gm.graph, True)
    assert not any(site.fused for site in again.sites), "nothing is left for a second run"


@settings(max_examples=40)
@given(program=programs, dynamic=st.booleans())
def test_compiled_programs(groups: list[str], program: Program, dynamic: bool) -> None:
    inputs = program.inputs()
    expected_inputs = [tensor.clone() for tensor in inputs]
    with torch.no_grad():
        expected = program(groups, expected_inputs)
    captured = capture(lambda *inputs: program(groups, list(inputs)), *inputs, dynamic=dynamic)
    assert_close([*captured.result, *inputs], [*expected, *expected_inputs], tolerance(program))
