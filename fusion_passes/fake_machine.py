"""A machine that is not there: a process group without other ranks, and tensors without memory or device.

Everything that is set up here is undone at the end of the `with`: the process group if one had to be made, two
Inductor options, torch.cuda.get_device_capability, DeviceMesh.__init__ and Module._apply.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from custom_ops import limits
from custom_ops.formats import Quantisation
from fusion_passes.environment import Environment

CAPABILITY = (9, 0)
"""What a fake CUDA device says it is: Hopper, where FlashInfer's kernels begin."""


class FakeEnvironment(Environment):
    """A machine whose GPUs can run everything, with FlashInfer; its limits are the conservative defaults."""

    def device_refusal(self, device: torch.device) -> str | None:
        """None for CUDA devices, whether there are any or not."""
        return None if device.type == "cuda" else super().device_refusal(device)

    def flashinfer_refusal(self, device: torch.device) -> str | None:
        """None: not asked for."""
        return None

    def quantisation_refusal(self, device: torch.device, quantisation: Quantisation) -> str | None:
        """None: they are of the newest kind."""
        return None

    def limits(self, device: torch.device, world_size: int) -> limits.Limits | None:
        """The defaults for devices that nobody has measured."""
        return None if device.type == "cpu" else limits.DEFAULTS.get(world_size, limits.NONE)


@contextmanager
def process_group(world_size: int) -> Iterator[int]:
    """Yields the world size of the default process group; of one whose collectives do nothing where there is none."""
    if dist.is_initialized():
        yield dist.get_world_size()
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield world_size
    finally:
        dist.destroy_process_group()


@contextmanager
def tensors(device: torch.device) -> Iterator[FakeTensorMode]:
    """Tensors made inside have a shape, a type and a device, but neither memory nor values.

    Args:
        device: the one that most of them will be on.
    """
    with ExitStack() as stack:
        if device.type != "cpu":
            # Both would run something on the device: a constant that is folded, and matrix products that are timed.
            stack.enter_context(inductor_config.patch(joint_graph_constant_folding=False, shape_padding=False))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=CAPABILITY))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        # A mesh is a table of ranks that is read while it is made.
        stack.enter_context(mock.patch.object(DeviceMesh, "__init__", _with_real_tensors(DeviceMesh.__init__)))
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        yield stack.enter_context(mode)


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Module._apply, behind `to`, `cuda` and `half`, for fake parameters: exchanges them, which `swap_tensors` cannot.

    Shared parameters stay shared.
    """
    done: dict[int, Any] = {}
    for module in self.modules() if recurse else (self,):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in done:
                    done[id(parameter)] = nn.Parameter(fn(parameter.data), parameter.requires_grad)
                module._parameters[name] = done[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = done.setdefault(id(buffer), fn(buffer))
    return self


def _with_real_tensors(fn: Callable[..., None]) -> Callable[..., None]:
    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            if isinstance(ranks := kwargs.get("_rank_map"), FakeTensor):  # from init_device_mesh: all ranks in order
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int, device="cpu")
            fn(*args, **kwargs)

    return call


def default_device() -> torch.device:
    """CUDA where torch is built with it, whether there is a GPU or not; otherwise the CPU."""
    return torch.device("cuda" if torch.backends.cuda.is_built() else "cpu")


def faked(mode: FakeTensorMode, model: Any, inputs: Any, device: torch.device) -> tuple[Any, torch.device]:
    """(a copy of a module with fake parameters, their device); the module itself if it has none that are real.

    A model that is sharded keeps the device of its mesh. A function is returned as it is, with that of its inputs.
    """
    if not isinstance(model, nn.Module):
        given = [leaf.device for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        return model, next(iter(given), device)
    found = [*model.parameters(), *model.buffers()]
    meshes = [one.device_mesh.device_type for one in found if isinstance(one, DTensor)]
    device = torch.device(meshes[0]) if meshes else device
    if any(isinstance(one, FakeTensor) or isinstance(getattr(one, "_local_tensor", None), FakeTensor) for one in found):
        return model, found[0].device
    with FakeCopyMode(mode):
        model = copy.deepcopy(model)
    return (model if meshes else model.to(device)), device


def fake_inputs(mode: FakeTensorMode, inputs: Any, device: torch.device) -> Any:
    """Inputs, with every real tensor inside them replaced by a fake one on a device."""

    def fake(tensor: Tensor) -> Tensor:
        real = not isinstance(tensor, FakeTensor | DTensor)
        return mode.from_tensor(tensor, static_shapes=True).to(device) if real else tensor

    return tree_map_only(Tensor, fake, inputs)
