"""Run a function on several processes that form one process group, and collect what each returns."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def default_backend(world_size: int) -> str:
    """nccl where there are enough GPUs, otherwise gloo."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= world_size else "gloo"


def spawn(fn: Callable[..., Any], *args: Any, world_size: int = 2, backend: str | None = None) -> list[Any]:
    """Call fn(*args) on world_size new processes and return what each returned, in rank order.

    With nccl rank r uses GPU r. fn must be importable by name, arguments and results picklable.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the others are stopped.
    """
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    backend = backend or default_backend(world_size)
    mp.spawn(_main, (fn, args, world_size, backend, _free_port(), results), world_size)
    found = dict(results.get() for _ in range(world_size))
    return [found[rank] for rank in range(world_size)]


def run(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any] | None:
    """Call fn(*args) on every rank and return what each returned, in rank order.

    Under torchrun its processes are the ranks, and all but the first get None; otherwise new processes are.

    Args:
        fn: importable by name.
        args: picklable.
        world_size: ranks to start where torchrun did not.
    """
    if not dist.is_torchelastic_launched():
        return spawn(fn, *args, world_size=world_size)
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    with _group(local, size, default_backend(int(os.environ.get("LOCAL_WORLD_SIZE", size)))):
        found: list[Any] = [None] * size
        dist.all_gather_object(found, fn(*args))
    return found if rank == 0 else None


def _main(
    rank: int, fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, backend: str, port: int, results: Any
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    init_method = f"tcp://127.0.0.1:{port}"
    with _group(rank, world_size, backend, init_method=init_method, rank=rank, world_size=world_size):
        results.put((rank, fn(*args)))


@contextmanager
def _group(local_rank: int, local_size: int, backend: str, **where: Any) -> Iterator[None]:
    if backend == "nccl":
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    dist.init_process_group(backend, **where)
    if backend == "gloo":
        # A rank that is done must not leave while another one still connects to it.
        dist.barrier()
    try:
        yield
    finally:
        import custom_ops

        custom_ops.destroy()
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
