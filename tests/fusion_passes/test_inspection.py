"""inspect_fusion, inspect_factory and assert_fused: on this machine, whatever it lacks, and with nothing left behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

import fusion_passes
from fusion_passes import FusionConfig, inspect_factory, inspect_fusion
from fusion_passes.testing import assert_fused
from tests.support import user_model
from tests.support.capture import capture
from tests.support.models import hugging_face, knows_plans, parallel_llama, token_ids
from tests.support.programs import HIDDEN, NORMS, AddNorm, JustNorm, reduce, tensors


def rules(found: fusion_passes.Inspection) -> list[str]:
    return [site.verdict for site in found.sites]


def test_module_with_collectives_of_its_own() -> None:
    found = inspect_fusion(AddNorm(NORMS["gemma"]()), *tensors(2, 8, HIDDEN), world_size=4, device="cpu")
    assert rules(found) == ["add_norm"]
    assert "_c10d_functional.all_reduce(arg0_1, 'sum', '0')" in found.before
    assert "call_trtllm_fused_allreduce_norm" in found.after
    assert "world_size=4" in found.after
    assert "all_reduce" not in found.after.replace("fused_allreduce", "").replace("allreduce_in", "")
    assert (found.device, found.world_size) == ("cpu", 4)
    assert "fake CPU tensors" in found.notes[0]


def test_graphs_are_those_of_a_compilation(fake_group: str) -> None:
    model = parallel_llama()
    found = inspect_fusion(model, token_ids(2, 16), world_size=2, device="cpu")
    captured = capture(model, token_ids(2, 16))
    assert found.before == captured.before[0]
    assert found.after == captured.after[0]
    assert [site.module for site in found.sites] == [site.module for site in captured.sites]


@knows_plans
def test_hugging_face_model(fake_group: str) -> None:
    found = inspect_fusion(hugging_face("llama"), input_ids=token_ids(2, 16), use_cache=False)
    assert rules(found) == ["norm", *["add_norm"] * 4]
    assert "the process group that exists has 2 ranks" in found.notes


def test_function_and_symbolic_graph_breaks() -> None:
    norm = NORMS["meta"]()

    def pieces(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = residual + reduce(x)
        torch._dynamo.graph_break()
        return norm(total)

    found = inspect_fusion(pieces, *tensors(2, 8, HIDDEN), device="cpu")
    assert len(found.graphs) == 2
    assert rules(found) == ["graph_ends"]


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built for CPUs only")
def test_fake_cuda_is_the_default_where_torch_is_built_for_it() -> None:
    found = inspect_factory(user_model.llama, world_size=2)
    assert found.device == "cuda"
    assert rules(found) == ["norm", *["add_norm"] * 4]
    assert "1e-05" in found.after, "on CUDA epsilon is exact"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch is built for CUDA")
def test_cpu_is_the_default_where_torch_is_built_for_nothing_else() -> None:
    found = inspect_factory(user_model.llama, world_size=2)
    assert found.device == "cpu"
    assert rules(found) == ["norm", *["add_norm"] * 4]


def test_factory_is_called_on_the_made_up_machine() -> None:
    seen = {}

    def huge() -> tuple[nn.Module, torch.Tensor]:
        weight = torch.empty(2**21, 2**21)  # 16 TiB
        seen["fake"], seen["ranks"] = isinstance(weight, FakeTensor), dist.get_world_size()
        return JustNorm(nn.RMSNorm(2**12)), torch.ones(2**20, 2**12)

    assert rules(inspect_factory(huge, world_size=16, device="cpu")) == ["norm"]
    assert seen == {"fake": True, "ranks": 16}


def test_nothing_is_left_behind() -> None:
    before = (nn.Module._apply, DeviceMesh.__init__, torch.cuda.get_device_capability)
    options = inductor_config.get_config_copy()
    model, inputs = AddNorm(NORMS["meta"]()), tensors(2, 8, HIDDEN)
    fusion_passes.enable(FusionConfig(fuse_allreduce_rms=False))
    installed = inductor_config.post_grad_custom_post_pass
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        inspect_fusion(model, *inputs)
    assert not dist.is_initialized()
    assert before == (nn.Module._apply, DeviceMesh.__init__, torch.cuda.get_device_capability)
    assert inductor_config.post_grad_custom_post_pass is installed
    fusion_passes.disable()
    assert inductor_config.get_config_copy() == options
    assert fusion_passes.report() == [], "an inspection is no compilation"
    for name, value in model.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, weights[name])
    with pytest.raises(ValueError, match="world_size=0: must be 1 or more"):
        inspect_fusion(model, *inputs, world_size=0)


def test_shared_parameters_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = AddNorm(NORMS["meta"]()), JustNorm(NORMS["meta"]())
            self.b.norm.weight = self.a.norm.weight

        def forward(self, x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x, r)[0])[0]

    found = inspect_fusion(Tied(), *tensors(2, 8, HIDDEN))
    assert rules(found) == ["add_norm", "norm"]
    assert sum(line.text.startswith("arg") for line in found.graphs[0].before) == 3


@pytest.mark.parametrize("made", [None, nn.Linear(1, 1), (1, 2, 3), ("model", ())], ids=str)
def test_factory_that_returns_something_else(made: object) -> None:
    with pytest.raises(ValueError, match=r"it must return \(module, inputs\)"):
        inspect_factory(lambda: made)


def test_assert_fused() -> None:
    block, inputs = AddNorm(NORMS["meta"]()), tensors(2, 8, HIDDEN)
    assert assert_fused(block, *inputs).sites[0].fused
    assert_fused(block, *inputs, count=1, rules={"add_norm": 1})
    assert_fused(block, *inputs, rules=["add_norm"])
    with pytest.raises(AssertionError, match=r"expected 2 to fuse, but 1 of 1 all-reduces fused \(add_norm 1\)"):
        assert_fused(block, *inputs, count=2)
    with pytest.raises(AssertionError, match=r"expected {'norm': 1} to fuse"):
        assert_fused(block, *inputs, rules={"norm": 1})
    with pytest.raises(AssertionError, match=r"expected \['norm'\] to fuse"):
        assert_fused(block, *inputs, rules=["norm"])


def test_assert_fused_without_numbers_wants_all_that_can_be() -> None:
    model, inputs = user_model.half()
    with pytest.raises(AssertionError, match=r"(?s)expected all that can be.*! all_reduce_1 .*norm_not_recognised"):
        assert_fused(model, **inputs)
    assert_fused(model, **inputs, count=1)
    with pytest.raises(AssertionError, match="0 of 0 all-reduces"):
        assert_fused(nn.Linear(4, 4), torch.ones(2, 4))
    two = lambda x, y: NORMS["meta"]()(reduce(x) + reduce(y))  # noqa: E731
    assert_fused(two, *tensors(2, 8, HIDDEN))  # one norm can take one of two sums
