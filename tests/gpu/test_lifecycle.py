"""Workspaces and CUDA graphs on real GPUs: capture needs a warm-up, growth keeps captured graphs valid, exits are clean."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import custom_ops
from custom_ops import limits, workspace
from tests.support import gpu
from tests.support.cached_program import both
from tests.support.gpu import case
from tests.support.ranks import Ranks


def capture_first() -> None:
    custom_ops.destroy()
    one = case(4, 4096)
    outputs = one.outputs()
    graph = torch.cuda.CUDAGraph()
    expected = pytest.raises(RuntimeError, match=r"run one step before the capture, or call custom_ops\.prepare")
    with expected, torch.cuda.graph(graph):
        one.call(*outputs)
    assert custom_ops.prepare(hidden_size=4096, max_token_num=4) is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one.call(*outputs)
    graph.replay()
    one.check(*outputs)


def test_capture_needs_a_warm_up_or_prepare(gpus: Ranks) -> None:
    gpus.run(capture_first)


def growth() -> None:
    custom_ops.destroy()
    small = case(16, 1024)
    outputs = small.outputs()
    small.call(*outputs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        small.call(*outputs)
    limit = limits.for_device(torch.cuda.get_device_name(), dist.get_world_size()).at(8192).one_shot_bytes
    if limit > workspace.MIN_CAPACITY:
        large = case(limit // 2 // 8192, 8192)
        large_outputs = large.outputs()
        large.call(*large_outputs)
        large.check(*large_outputs)
        assert len(list(custom_ops.workspaces())) == 2
    for seed in range(1000):
        small.x.fill_(seed % 7 + dist.get_rank())
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        if seed % 100 == 0:
            small.check(*outputs)
            small.call(*small.outputs())
    small.check(*outputs)


def test_growth_keeps_captured_graphs_valid(gpus: Ranks) -> None:
    gpus.run(growth)


def alternating_groups() -> None:
    everyone = list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone) for _ in range(2)]
    cases = [case(8, 4096, seed=seed) for seed in range(2)]
    for _ in range(20):
        for group, one in zip(groups, cases, strict=True):
            outputs = one.outputs()
            one.call(*outputs, group_name=group.group_name)
            one.check(*outputs)
    names = {name for name, _, _ in custom_ops.workspaces()}
    assert {group.group_name for group in groups} <= names, "one workspace per group"
    custom_ops.destroy()
    for group in groups:
        dist.destroy_process_group(group)


def test_two_groups_of_the_same_ranks(gpus: Ranks) -> None:
    gpus.run(alternating_groups)


def unsynchronised(rounds: int) -> None:
    """Calls in poisoned buffers, new data each time, the next kernel launched with PDL, and no synchronisation."""
    counts = (1, 2, 4, 8, 16, 17, 64)
    cases = {tokens: [case(tokens, 4096, seed=seed) for seed in range(4)] for tokens in counts}
    bad = torch.zeros((), device=gpu.device(), dtype=torch.int64)
    expected = {tokens: [_reference(one) for one in variants] for tokens, variants in cases.items()}
    for index in range(rounds):
        tokens = counts[index % len(counts)]
        variant = (index // len(counts)) % 4
        one = cases[tokens][variant]
        norm, total = one.outputs()
        one.call(norm, total)
        bad += (total != expected[tokens][variant]).sum() + norm.isnan().sum()
    assert bad.item() == 0


def _reference(one: gpu.Case) -> torch.Tensor:
    total = one.x.clone()
    dist.all_reduce(total)
    return total + one.residual


def test_unsynchronised_calls(gpus: Ranks) -> None:
    if gpus.world_size == 2:
        gpus.run(unsynchronised, 2000)


SCRIPT = """
import sys, torch, torch.distributed as dist
import custom_ops
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=sys.argv[2], rank=rank, world_size=int(sys.argv[4]), device_id=torch.device("cuda", rank))
x = torch.ones(4, 1024, device="cuda", dtype=torch.bfloat16)
outputs = torch.empty_like(x), torch.empty_like(x)
torch.ops.custom_ops.call_trtllm_fused_allreduce_norm(
    x, x, x[0], 1e-6, dist.get_world_size(), True, True, 0, 1, outputs[0], residual_out=outputs[1])
assert (outputs[1] == dist.get_world_size() + 1).all()
for step in sys.argv[3].split(","):
    {"destroy": custom_ops.destroy, "group": dist.destroy_process_group, "": lambda: None}[step]()
"""


def ended(program: str, address: str, ending: str, world_size: int) -> list[subprocess.CompletedProcess[str]]:
    """The ranks of a program when they have ended, with what they wrote."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-X", "dev", "-c", program, str(rank), address, ending, str(world_size)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, output)
        for rank, output in zip(ranks, outputs, strict=True)
    ]


@pytest.mark.parametrize("ending", ["destroy,group", "group,destroy", "group", "destroy,destroy,group"])
def test_clean_exit(gpus: Ranks, ending: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device for each rank")
    for rank in ended(SCRIPT, f"file://{tmp_path / 'store'}", ending, gpus.world_size):
        assert rank.returncode == 0, rank.stdout
        for word in ("Traceback", "Segmentation", "was not explicitly destroyed", "terminate called"):
            assert word not in rank.stdout, rank.stdout


def test_a_warm_cache_makes_its_workspace(gpus: Ranks, tmp_path: Path) -> None:
    """What the pass does not run for, the op does; also where one rank compiles and the other does not."""
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device for each rank")
    gpus.run(custom_ops.destroy)
    for cold in ([0, 1], [], [1]):
        for rank in cold:
            shutil.rmtree(tmp_path / str(rank), ignore_errors=True)
        for rank, found in enumerate(both(tmp_path)):
            assert found["counts"] == ([0, 1] if rank in cold else [1, 0])
            assert found["ran"] == {"one_shot": 1}
            assert found["workspaces"] == 1


def test_an_exception_ends_the_ranks_and_nothing_crashes_on_the_way_out(gpus: Ranks, tmp_path: Path) -> None:
    """Workspaces, process group and all are left to the interpreter."""
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a device for each rank")
    program = SCRIPT.replace("for step in", "raise KeyError('a bug of the user')\nfor step in")
    for rank in ended(program, f"file://{tmp_path / 'store'}", "", gpus.world_size):
        assert rank.returncode == 1, rank.stdout
        assert "a bug of the user" in rank.stdout
        for word in ("Segmentation", "terminate called", "Exception ignored"):
            assert word not in rank.stdout, rank.stdout
