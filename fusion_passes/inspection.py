"""What the pass does to a model, on any machine: no GPU, no process group, no memory for the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fusion_passes import fake_machine, tracing
from fusion_passes.config import FusionConfig
from fusion_passes.recorder import RecordedGraph, Recorder
from fusion_passes.reporting import SiteReport


class FactoryError(ValueError):
    """A factory returned something else than a module and its inputs."""


@dataclass(frozen=True)
class Inspection:
    """What became of a model.

    Attributes:
        graphs: its graphs before and after the pass, node by node.
        device: of the fake tensors.
        world_size: ranks of the process group.
        notes: what may differ on the machine where the model will run.
    """

    graphs: tuple[RecordedGraph, ...]
    device: str
    world_size: int
    notes: tuple[str, ...]

    @property
    def sites(self) -> list[SiteReport]:
        """A verdict for every all-reduce of every graph."""
        return [site for graph in self.graphs for site in graph.sites]

    @property
    def before(self) -> str:
        """Text of the graphs as the pass finds them, one node a line."""
        return "\n\n".join("\n".join(line.text for line in graph.before) for graph in self.graphs)

    @property
    def after(self) -> str:
        """Text of the graphs as the pass leaves them."""
        return "\n\n".join("\n".join(line.text for line in graph.after) for graph in self.graphs)


def inspect_fusion(
    model: Callable[..., Any],
    *inputs: Any,
    world_size: int = 8,
    device: torch.device | str | None = None,
    config: FusionConfig | None = None,
    **kwargs: Any,
) -> Inspection:
    """Compile a model up to the pass, with fake tensors, and return what the pass saw and did.

    Nothing is computed and nothing is allocated: parameters and inputs are replaced by fake ones, in a copy of the
    model. What is set up for that is undone afterwards (see fusion_passes.fake_machine).

    Args:
        model: a module or function, as given to torch.compile; sharded already, or with collectives of its own.
        *inputs: its positional inputs.
        world_size: ranks of the process group that is made up; where one exists, that one is used.
        device: of the fake tensors; None takes CUDA where torch is built with it, otherwise the CPU. A model that is
            sharded keeps the device of its mesh, a function that of its inputs.
        config: of the pass.
        **kwargs: the model's other inputs.

    Raises:
        ValueError: world_size is less than 1.
    """
    return _inspect(lambda: (model, inputs, kwargs), world_size, device, config)


def inspect_factory(
    factory: Callable[[], Any],
    *,
    world_size: int = 8,
    device: torch.device | str | None = None,
    config: FusionConfig | None = None,
) -> Inspection:
    """Like inspect_fusion, for a model that is made and sharded on the made-up machine.

    So a model of any size can be inspected: its parameters never exist.

    Args:
        factory: returns (module, inputs), where inputs is one tensor, a tuple of positional or a dict of named inputs.
        world_size: as in inspect_fusion.
        device: as in inspect_fusion; it is torch's default device while the factory runs.
        config: of the pass.

    Raises:
        ValueError: world_size is less than 1.
        FactoryError: the factory returns something else; a ValueError.
    """

    def make() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        made = factory()
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
            kind = type(made).__name__
            raise FactoryError(f"the factory returned a {kind}; it must return (module, inputs)")
        model, inputs = made
        if isinstance(inputs, dict):
            return model, (), inputs
        return model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}

    return _inspect(make, world_size, device, config)


def _inspect(
    make: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]],
    world_size: int,
    device: torch.device | str | None,
    config: FusionConfig | None,
) -> Inspection:
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be 1 or more")
    wanted = fake_machine.default_device() if device is None else torch.device(device)
    recorder = Recorder(config, fake_machine.FakeEnvironment())
    with fake_machine.process_group(world_size) as ranks, fake_machine.tensors(wanted) as mode, torch.no_grad():
        with wanted:
            model, inputs, kwargs = make()
        model, used = fake_machine.faked(mode, model, (inputs, kwargs), wanted)
        inputs, kwargs = fake_machine.fake_inputs(mode, (inputs, kwargs), used)
        tracing.call(model, inputs, kwargs, (recorder,))
    return Inspection(tuple(recorder.graphs), used.type, ranks, tuple(_notes(used, wanted, ranks, world_size)))


def _notes(used: torch.device, wanted: torch.device, ranks: int, world_size: int) -> list[str]:
    notes = []
    if used.type == "cpu":
        notes.append("fake CPU tensors: on CUDA the epsilon of torch's own norms is exact, and limits of size apply")
    else:
        notes.append(
            "a fake GPU of compute capability 9.0: limits of size are the defaults, FlashInfer is taken to be there"
        )
    if used.type != wanted.type:
        notes.append(f"on {used.type}, not {wanted.type}: as the mesh of the model, or the inputs of the function")
    if ranks != world_size:
        notes.append(f"the process group that exists has {ranks} ranks")
    return notes
