"""Workspaces: the memory through which the ranks of one group exchange data, owned here and nowhere else.

One workspace per (group, dtype class, capacity). It is made at the first call that needs it, by all ranks of exactly
that group, after a vote, and never while a CUDA graph is captured. A larger message makes a larger one; the smaller one
stays, because captured graphs hold its pointers. What failed once is remembered and not tried again.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator

import torch
from torch.distributed import ProcessGroup

from custom_ops import backends, consensus, domain, flashinfer_adapter, groups, limits, machine, probe
from custom_ops.group_state import GroupState, Workspace
from custom_ops.limits import Limits

logger = logging.getLogger("custom_ops")

MIN_CAPACITY = 8 * limits.MIB
"""Smallest workspace, in bytes of the message: enough for any decode step."""


_STATES: weakref.WeakKeyDictionary[ProcessGroup, dict[str, GroupState]] = weakref.WeakKeyDictionary()
"""The registry, by group and backend. A state is freed with destroy(), with its process group, or at exit."""

_LOCK = threading.RLock()


def known_state(group: ProcessGroup, backend: str | None = None) -> GroupState | None:
    """The state of a group that has voted on a backend (None: the default); None otherwise."""
    return _STATES.get(group, {}).get(backend or backends.DEFAULT)


def state_of(group: ProcessGroup, device: torch.device, backend: str = backends.DEFAULT) -> GroupState:
    """The agreed state of a group on this rank's device; the first call is a vote of all its ranks."""
    state = known_state(group, backend)
    if state is not None and state.agreed:
        return state
    with _LOCK:
        _refuse_in_capture("the first call on this process group")
        if state is None:
            state = _STATES.setdefault(group, {})[backend] = GroupState(backend)
            weakref.finalize(group, state.reset)
        facts = machine.facts(device, group.size(), backends.find(backend).one_host)
        topic = f"{backend}/{state.generation}/facts"
        state.problem = consensus.agree(group, topic, facts, machine.refusal(device))
        state.limit_to(limits.NONE if state.problem else limits.for_device(machine.name(device), group.size()))
        state.agreed = True
        _explain(group, state.problem)
        return state


def limit_to(world_size: int, found: Limits) -> None:
    """Let sizes run fused as these limits say in every group of a size that has voted; SPMD, as the ops are."""
    with _LOCK:
        for group, state in _all():
            if state.agreed and not state.problem and group.size() == world_size:
                state.limit_to(found)


def problem_of(group_name: str) -> str | None:
    """Why calls of a group run unfused, as its ranks have agreed; None where they have not, or nothing is wrong."""
    try:
        states = _STATES.get(groups.resolve(group_name), {})
    except ValueError:  # there is no such group any more
        return None
    problems = (state.problem or next(iter(state.failures.values()), None) for state in states.values())
    return next(filter(None, problems), None)


def acquire(
    group: ProcessGroup, dtype: torch.dtype, device: torch.device, nbytes: int, backend: str = backends.DEFAULT
) -> Workspace | str:
    """A workspace for a message of nbytes bytes, made by all ranks now if there is none; or why there is none.

    Raises:
        RuntimeError: one would have to be made while a CUDA graph is captured.
    """
    state = state_of(group, device, backend)
    existing = state.workspaces.get(dtype.itemsize)
    if existing and existing[-1].capacity >= nbytes:
        return existing[-1]
    if failure := state.problem or state.failures.get(dtype.itemsize):
        return failure
    with _LOCK:
        _refuse_in_capture(f"a message of {nbytes} bytes of {dtype}")
        made = _make(group, state, dtype, device, _capacity_for(nbytes, group.size()))
        if isinstance(made, str):
            state.failures[dtype.itemsize] = made
            _explain(group, made)
        else:
            state.workspaces.setdefault(dtype.itemsize, []).append(made)
        return made


def prepare(
    group_name: str | None = None,
    *,
    hidden_size: int,
    max_token_num: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    backend: str | None = None,
) -> str | None:
    """Build FlashInfer's kernels and make the workspace ahead of the first call; collective over the group.

    Call it once on every rank of the group before CUDA graphs are captured, or to keep a compilation of some minutes
    out of the first step. Messages above the limit of the device and world size run unfused and need no workspace.

    Args:
        group_name: ProcessGroup.group_name; None for the default group.
        hidden_size: elements of a row.
        max_token_num: largest number of tokens of a call.
        dtype: torch.bfloat16, torch.float16 or torch.float32.
        device: this rank's device; default the current CUDA device. A CPU device needs nothing.

    Returns:
        None if calls up to that size can run fused, otherwise why they run unfused.

    Raises:
        ValueError: unknown group.
    """
    group = groups.resolve(group_name)
    device = device or machine.default_device()
    if device.type != "cuda":
        return None
    if refusal := domain.shape_refusal(hidden_size, dtype, group.size()):
        return refusal
    chosen = backends.find(backend).name
    state = state_of(group, device, chosen)
    if state.problem:
        return state.problem
    wanted = max_token_num * hidden_size * dtype.itemsize
    found = state.limits.at(hidden_size)
    served = min(wanted, max(found.one_shot_bytes, found.two_shot_bytes))
    made = acquire(group, dtype, device, served, chosen)
    return made if isinstance(made, str) else None


def destroy(group_name: str | None = None) -> None:
    """Free the workspaces of a group (None: of all groups of this rank). Idempotent; collective over each group.

    Call it on every rank, before destroy_process_group, when no captured graph that holds a workspace runs again. The
    next call makes a new workspace.
    """
    with _LOCK:
        for group, state in _all():
            if group_name in (None, group.group_name) and state.agreed:
                state.reset()


def workspaces() -> Iterator[tuple[str, int, int]]:
    """(group name, element size, capacity in bytes) of every live workspace."""
    for group, state in _all():
        for itemsize, made in state.workspaces.items():
            yield from ((group.group_name, itemsize, workspace.capacity) for workspace in made)


def _all() -> list[tuple[ProcessGroup, GroupState]]:
    return [(group, state) for group, states in list(_STATES.items()) for state in states.values()]


def _capacity_for(nbytes: int, world_size: int) -> int:
    power_of_two = 1 << max(nbytes - 1, 0).bit_length()
    return min(max(power_of_two, MIN_CAPACITY), domain.max_capacity(world_size))


def _make(
    group: ProcessGroup, state: GroupState, dtype: torch.dtype, device: torch.device, capacity: int
) -> Workspace | str:
    """Vote, build, create and try out, each step agreed before the next begins."""
    topic = f"{state.backend}/{state.generation}/{dtype.itemsize}/{capacity}"
    # FlashInfer allocates four times world size x capacity; the rest is for the zeros and for rounding.
    needed = 5 * group.size() * capacity
    if problem := consensus.agree(group, f"{topic}/room", {"bytes": capacity}, machine.shortage(device, needed)):
        return problem
    made: list[Workspace] = []

    def create() -> None:
        handle = flashinfer_adapter.create(group, dtype, capacity, state.backend)
        made.append(Workspace(capacity, handle, torch.zeros(capacity, dtype=torch.uint8, device=device)))

    steps = {
        "build": lambda: flashinfer_adapter.build(announce=group.rank() == 0),
        "create": create,
        "probe": lambda: probe.check_sum(made[0].handle, group, dtype, device),
    }
    for name, step in steps.items():
        problem = machine.attempt(step, device)
        if problem := consensus.agree(group, f"{topic}/{name}", {}, problem, consensus.BUILD_TIMEOUT):
            for workspace in made:
                flashinfer_adapter.release(workspace.handle, state.backend)
            return problem
    return made[0]


def _explain(group: ProcessGroup, problem: str | None) -> None:
    if problem and group.rank() == 0:
        logger.warning("all-reduces of group %r run unfused: %s", group.group_name, problem)


def _refuse_in_capture(cause: str) -> None:
    if machine.capturing():
        raise RuntimeError(
            f"{cause} needs an all-reduce workspace, which cannot be made while a CUDA graph is captured: run one step "
            "before the capture, or call custom_ops.prepare(group_name, hidden_size=..., max_token_num=...)"
        )
