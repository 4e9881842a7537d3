"""The ways in, and that they compose with passes that are already installed and restore them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import fusion_passes
from fusion_passes import AllReduceRMSFusionPass, FusionConfig, compat
from fusion_passes.config import ENVIRONMENT_FLAG
from tests.support.programs import HIDDEN, NORMS, AddNorm, tensors

pytestmark = pytest.mark.usefixtures("fake_group")


class Foreign(CustomGraphPass):
    """Somebody else's pass; it counts the all-reduces that it sees."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, graph: Graph) -> None:
        self.seen.append(sum("all_reduce" in str(node.target) for node in graph.nodes))

    def uuid(self) -> str:
        return "foreign"


@pytest.fixture(autouse=True)
def no_caches() -> Iterator[None]:
    with compat.without_caches():
        yield


def installed() -> tuple[Any, ...]:
    return compat.installed(inductor_config.post_grad_custom_post_pass)


def compile_and_call(**how: Any) -> list[bool]:
    """Whether each all-reduce of a block fused."""
    torch._dynamo.reset()
    fusion_passes.reset_report()
    with torch.no_grad():
        torch.compile(AddNorm(NORMS["meta"]()), fullgraph=True, **how)(*tensors(2, 8, HIDDEN))
    return [site.fused for site in fusion_passes.report()]


def test_nothing_happens_unasked() -> None:
    assert compile_and_call() == []


def test_options() -> None:
    assert compile_and_call(options=fusion_passes.options()) == [True]
    assert compile_and_call() == [], "one compilation only"
    assert compile_and_call(options=fusion_passes.options(FusionConfig(fuse_allreduce_rms=False))) == [False]
    assert compile_and_call(options={**fusion_passes.options(), "max_autotune": False}) == [True]


def test_enabled() -> None:
    with fusion_passes.enabled():
        assert compile_and_call() == [True]
    assert compile_and_call() == []
    assert installed() == ()


def test_enable_and_disable() -> None:
    fusion_passes.enable()
    assert compile_and_call() == [True]
    fusion_passes.enable(FusionConfig(fuse_allreduce_rms=False))
    assert compile_and_call() == [False], "the later configuration replaces the earlier"
    fusion_passes.disable()
    assert compile_and_call() == []
    fusion_passes.disable()


def test_backend_entry_point() -> None:
    assert "fused_allreduce" in torch._dynamo.list_backends()
    assert compile_and_call(backend="fused_allreduce") == [True]
    off = {"fusion_config": FusionConfig(fuse_allreduce_rms=False)}
    assert compile_and_call(backend="fused_allreduce", options=off) == [False]


@pytest.mark.parametrize("how", ["options", "enabled", "enable", "backend"])
def test_composes_with_a_pass_that_is_there(how: str) -> None:
    foreign = Foreign()
    with inductor_config.patch(post_grad_custom_post_pass=foreign):
        if how == "options":
            assert compile_and_call(options=fusion_passes.options()) == [True]
        elif how == "enabled":
            with fusion_passes.enabled():
                assert compile_and_call() == [True]
        elif how == "enable":
            fusion_passes.enable()
            assert compile_and_call() == [True]
            fusion_passes.disable()
        else:
            assert compile_and_call(backend="fused_allreduce") == [True]
        assert foreign.seen == [1], "it ran, before ours"
        assert inductor_config.post_grad_custom_post_pass is foreign, "and is restored"


def test_disable_keeps_a_pass_that_came_later() -> None:
    foreign = Foreign()
    fusion_passes.enable()
    inductor_config.post_grad_custom_post_pass = compat.as_hook((*installed(), foreign))
    fusion_passes.disable()
    assert installed() == (foreign,)
    inductor_config.post_grad_custom_post_pass = None


def test_enabled_restores_an_outer_configuration() -> None:
    with fusion_passes.enabled(FusionConfig(fuse_allreduce_rms=False)):
        with fusion_passes.enabled():
            assert compile_and_call() == [True]
        assert compile_and_call() == [False]
    with pytest.raises(KeyError), fusion_passes.enabled():
        raise KeyError
    assert installed() == ()


@pytest.mark.parametrize(("value", "flag", "fused"), [("0", True, False), ("1", False, True), ("", True, True)])
def test_environment_overrides_the_flag(monkeypatch: pytest.MonkeyPatch, value: str, flag: bool, fused: bool) -> None:
    monkeypatch.setenv(ENVIRONMENT_FLAG, value)
    assert compile_and_call(options=fusion_passes.options(FusionConfig(fuse_allreduce_rms=flag))) == [fused]


def test_environment_must_be_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_FLAG, "yes")
    with pytest.raises(ValueError, match="FUSION_PASSES_FUSE_ALLREDUCE_RMS='yes': must be 0 or 1"):
        fusion_passes.options()


@pytest.mark.parametrize("bad", [{"pdl_advance_launch_tokens": -1}, {"max_token_num": 0}], ids=str)
def test_configuration_refuses_nonsense(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        FusionConfig(**bad)  # type: ignore[arg-type]


def test_configuration_reaches_the_op() -> None:
    code = compiled_code(
        FusionConfig(launch_with_pdl=False, fp32_acc=False, pdl_advance_launch_tokens=4, max_token_num=99)
    )
    call = next(line for line in code.splitlines() if "call_trtllm_fused_allreduce_norm.default(" in line)
    assert "2, False, False, 99, 1" in call
    assert "pdl_advance_launch_tokens=4" in call


def compiled_code(config: FusionConfig | None = None) -> str:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    compiled = torch.compile(AddNorm(NORMS["meta"]()), fullgraph=True, options=fusion_passes.options(config))
    with torch.no_grad():
        _, code = run_and_get_code(compiled, *tensors(2, 8, HIDDEN))
    return "".join(code)


def test_a_chain_of_passes_keeps_its_identifiers() -> None:
    """The form that the hook takes where it takes a single pass."""
    ours, foreign = AllReduceRMSFusionPass(), Foreign()
    chain = compat.PassChain((foreign, ours))
    assert compat.installed(chain) == (foreign, ours)
    assert chain.uuid() == ("foreign", ours.uuid())
    assert compat.PassChain((foreign, lambda graph: None)).uuid() is None
    with inductor_config.patch(post_grad_custom_post_pass=chain):
        assert compile_and_call() == [True]
    assert foreign.seen == [1]
