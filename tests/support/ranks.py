"""Real process groups for tests: worker processes that stay up between tests and run functions on all ranks."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

START_TIMEOUT = 180.0


class RankError(AssertionError):
    """What a function raised on some rank, with its traceback, or that a rank did not answer."""


class Ranks:
    """Processes that form one process group of a backend, gloo or nccl.

    Rank r uses GPU r with nccl. With gloo and shared_gpu all ranks use the first GPU, in turns: what they compute is
    the same, how fast says nothing.
    """

    def __init__(self, world_size: int, backend: str = "gloo", shared_gpu: bool = False) -> None:
        self.world_size = world_size
        context = mp.get_context("spawn")
        address = f"tcp://127.0.0.1:{_free_port()}"
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(there, backend, address, rank, world_size, shared_gpu),
                daemon=True,
                name=f"rank{rank}",
            )
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        self._collect(START_TIMEOUT)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call fn(*args) on every rank and return what each returned, in rank order.

        fn is imported by name in the workers; arguments and results are pickled.
        """
        for pipe in self._pipes:
            pipe.send((fn, args))
        return self._collect(timeout)

    @property
    def alive(self) -> bool:
        """Whether all ranks can take another call."""
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        """End all ranks, by force if need be."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()

    def _collect(self, timeout: float) -> list[Any]:
        results, problems = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                problems.append(f"rank {rank} did not answer within {timeout:.0f} s")
                continue
            try:
                ok, value = pipe.recv()
            except (EOFError, ConnectionError):
                problems.append(f"rank {rank} ended, exit code {self._processes[rank].exitcode}")
                continue
            results.append(value)
            if not ok:
                problems.append(f"rank {rank}:\n{value}")
        if problems:
            # The ranks may be out of step with each other: the next test gets new ones.
            for process in self._processes:
                process.kill()
                process.join()
            raise RankError("\n".join(problems))
        return results


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(pipe: Connection, backend: str, address: str, rank: int, world_size: int, shared_gpu: bool) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    if shared_gpu:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    import torch
    import torch.distributed as dist

    import custom_ops
    import fusion_passes

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    elif shared_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
    pipe.send((True, None))
    while (call := pipe.recv()) is not None:
        fn, args = call
        try:
            torch.manual_seed(rank)
            torch._dynamo.reset()
            custom_ops.reset_launches()
            fusion_passes.reset_report()
            pipe.send((True, fn(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    custom_ops.destroy()
    dist.destroy_process_group()
