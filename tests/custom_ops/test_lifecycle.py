"""Processes that use the ops end cleanly, whatever they tidy up and whatever happens to them; on CPUs, with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import custom_ops
from fusion_passes import ranks

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import custom_ops

rank = int(os.environ["RANK"])


def begin(number):
    # A store of its own: torchrun's keeps what an earlier group has left in it, and gloo then connects to that.
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store{number}", rank=rank, world_size=2)


def once(hidden=64):
    x, residual = torch.ones(4, hidden), torch.ones(4, hidden)
    norm_out, residual_out = torch.empty_like(x), torch.empty_like(x)
    custom_ops.call_trtllm_fused_allreduce_norm(
        x, residual, None, 1e-6, 2, True, True, 0, 1, norm_out, residual_out=residual_out
    )
    assert (residual_out == 3).all()


begin(0)
once()
"""

# gloo itself aborts now and then in a process that ends without destroy_process_group, whatever ran before.
GONE = "dist.destroy_process_group()"
ENDINGS = {
    "the group alone": GONE,
    "destroy, then the group": f"custom_ops.destroy(); {GONE}",
    "destroy twice": f"custom_ops.destroy(); custom_ops.destroy(); {GONE}",
    "the group, then destroy": f"{GONE}; custom_ops.destroy()",
    "another model, wider": f"once(4096); {GONE}",
    "a group made again": f"{GONE}; begin(1); once(); {GONE}",
    "a caught exception": f"try:\n    once(-1)\nexcept RuntimeError:\n    once()\n    {GONE}",
}


def run(program: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", path, tmp_path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_clean_exit(ending: str, tmp_path: Path) -> None:
    done = run(PROGRAM + ENDINGS[ending], tmp_path)
    assert done.returncode == 0, done.stderr
    for unwanted in ("Traceback", "Exception ignored", "leaked", "Segmentation", "core dumped"):
        assert unwanted not in done.stderr, done.stderr


def test_a_failing_rank_ends_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(PROGRAM + f"if rank == 1:\n    {GONE}\n    raise SystemExit(7)\nonce()", tmp_path)
    assert done.returncode == 1
    assert "exitcode" in done.stderr
    assert time.monotonic() - started < 90
    assert "Exception ignored" not in done.stderr


def sums() -> float:
    return float(custom_ops.flashinfer_all_reduce(torch.ones(2, 64)).sum())


def in_a_fork(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    assert sums() == 256.0
    custom_ops.destroy()
    dist.destroy_process_group()


def test_forked_and_spawned_ranks() -> None:
    assert ranks.spawn(sums, world_size=2, backend="gloo") == [256.0, 256.0]
    torch.multiprocessing.start_processes(in_a_fork, (ranks._free_port(),), nprocs=2, start_method="fork")
