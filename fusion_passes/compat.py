"""What differs between the supported releases of torch, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

GraphPass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
"""Base of a pass. From torch 2.12 on a pass is told whether its graph is for inference."""

TAKES_SEVERAL = hasattr(custom_graph_pass, "get_custom_graph_passes")
"""Whether the hook takes a tuple of passes (torch 2.12 and later) or one."""

Pass = Callable[..., None]


def is_inference_graph(graph: Graph) -> bool:
    """Whether a post-grad graph is for inference, by AOTAutograd's names for the inputs of training graphs."""
    training = ("primals_", "tangents_")
    return not any(node.op == "placeholder" and str(node.target).startswith(training) for node in graph.nodes)


class PassChain(CustomGraphPass):
    """Several passes as one, for releases whose hook takes one."""

    def __init__(self, passes: Sequence[Pass]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        """Run the passes in order."""
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any | None:
        """The identifiers of all; None, which turns caching off, if one has none."""
        ids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes]
        return None if None in ids else tuple(ids)


def installed(value: object) -> tuple[Pass, ...]:
    """The passes of a value of the hook."""
    if value is None:
        return ()
    if isinstance(value, PassChain):
        return value.passes
    passes: Any = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(passes)


def as_hook(passes: Sequence[Pass]) -> object:
    """A value of the hook that runs some passes in order."""
    if len(passes) <= 1:
        return passes[0] if passes else None
    return tuple(passes) if TAKES_SEVERAL else PassChain(passes)


def inductor_launches_with_pdl() -> bool:
    """Whether Inductor launches its own kernels with PDL, in the compilation that runs now."""
    return bool(getattr(inductor_config.triton, "enable_pdl", False))


def graph_name() -> str:
    """AOTAutograd's name of the graph being compiled; "graph" outside of a compilation."""
    try:
        from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name

        return str(get_aot_graph_name())
    except (ImportError, LookupError, RuntimeError, AttributeError):
        return "graph"


@contextmanager
def without_caches() -> Iterator[None]:
    """Compile anew inside: a graph from a cache runs no pass and adds no verdicts."""
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


TORCH_VERSION = str(torch.__version__)
