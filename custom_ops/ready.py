"""Calls of a kind that ran before: checked and planned once, launched directly from then on.

What depends on types, shapes and flags is the key. What depends on addresses is looked at in every call: a tensor that
is not aligned, or an output that overlaps another tensor, takes the long way, which copies it or says what is wrong.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from custom_ops import domain, overlap, workspace
from custom_ops.counters import Count
from custom_ops.flashinfer_direct import Direct


class Tensors(NamedTuple):
    """The tensors of a call; what is not there is None."""

    allreduce_in: Tensor
    residual: Tensor | None = None
    gamma: Tensor | None = None
    scale_factor: Tensor | None = None
    norm_out: Tensor | None = None
    quant_out: Tensor | None = None
    scale_out: Tensor | None = None
    residual_out: Tensor | None = None
    allreduce_out: Tensor | None = None


_FIRST_OUTPUT = Tensors._fields.index("norm_out")


class Ready:
    """Launches calls of one kind.

    Args:
        direct: FlashInfer's inner call with all that does not change.
        count: where calls are counted.
        tensors: of the call that was checked.
    """

    __slots__ = ("_count", "_direct", "_pairs", "_present", "_sizes")

    def __init__(self, direct: Direct, count: Count, tensors: Tensors) -> None:
        self._direct, self._count = direct, count
        self._present = [place for place, tensor in enumerate(tensors) if tensor is not None]
        self._sizes = [0 if tensor is None else overlap.reach(tensor) for tensor in tensors]
        outputs = [place for place in self._present if place >= _FIRST_OUTPUT]
        self._pairs = [(out, other) for out in outputs for other in self._present if other < out]

    def launch(self, tensors: Tensors, eps: float) -> bool:
        """Launch a call of this kind; False, and nothing done, if its addresses need the long way."""
        starts = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        for place in self._present:
            if starts[place] % domain.ACCESS_BYTES and place != _SCALE:
                return False
        sizes = self._sizes
        for out, other in self._pairs:
            a, b = starts[out], starts[other]
            if a < b + sizes[other] and b < a + sizes[out]:
                same = a == b and sizes[out] == sizes[other] and other < _FIRST_OUTPUT
                if not same:
                    return False
        self._count.value += 1
        self._direct(tensors, eps)
        return True


_MOST_KINDS = 4096
"""Kinds that are kept for a group: one for each number of tokens, of which there may be many."""

_SCALE = Tensors._fields.index("scale_factor")
"""One number is read as such: it need not be aligned."""


def key(flags: tuple[Hashable, ...], tensors: Tensors) -> Hashable:
    """What calls of one kind have in common."""
    parts: list[Hashable] = [flags]
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
        else:
            parts += (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    return tuple(parts)


def find(group: ProcessGroup, kind: Hashable, backend: str | None = None) -> Ready | None:
    """The launcher of a kind of calls on a group; None where none has run, or the workspaces have gone since."""
    state = workspace.known_state(group, backend)
    return None if state is None else state.ready.get(kind)


def keep(group: ProcessGroup, kind: Hashable, made: Ready) -> None:
    """Launch calls of a kind like this, until the group's workspaces go."""
    state = workspace.known_state(group)
    if state is not None:
        if len(state.ready) >= _MOST_KINDS:
            state.ready.clear()
        state.ready[kind] = made
