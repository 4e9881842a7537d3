"""torch.compile up to and including Inductor's post-grad passes: the graphs without the code.

The same Dynamo, AOTAutograd, joint and post-grad passes run as in a real compilation, so the graphs at the hook are the
same. Only the lowering to Triton or C++ is left out, and the graph itself is run in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

from fusion_passes import compat


def call(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    kwargs: dict[str, Any],
    passes: Sequence[compat.Pass],
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    final: Callable[[Graph], None] = lambda graph: None,
) -> Any:
    """Compile and call a function in a fresh Dynamo, with passes at the post-grad hook in place of those installed.

    Args:
        fn: a function or module.
        inputs: its positional inputs.
        kwargs: its other inputs.
        passes: what runs at the hook, in this order.
        dynamic: as in torch.compile.
        fullgraph: as in torch.compile.
        final: called with each graph after all post-grad passes.

    Returns:
        What fn returns, computed by the graphs that the passes left.
    """
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx as inductor

    def inner(gm: GraphModule, example_inputs: Sequence[Any], **flags: Any) -> Any:
        inductor.view_to_reshape(gm)
        with torch.no_grad():
            fake_mode = inductor.fake_tensor_prop(gm, example_inputs)
        with V.set_fake_mode(fake_mode):
            inductor._recursive_post_grad_passes(gm, is_inference=flags.get("is_inference", False))
        final(gm.graph)
        gm.recompile()
        return make_boxed_func(gm.forward)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return inductor.compile_fx(gm, example_inputs, inner_compile=inner)

    torch._dynamo.reset()
    with inductor_config.patch(post_grad_custom_post_pass=compat.as_hook(passes), force_disable_caches=True):
        return torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph)(*inputs, **kwargs)


class Snapshot(CustomGraphPass):
    """A pass that looks at each graph and changes nothing."""

    def __init__(self, look: Callable[[Graph], None]) -> None:
        self.look = look

    def __call__(self, graph: Graph) -> None:
        """Look at a graph."""
        self.look(graph)

    def uuid(self) -> Any | None:
        """None: nothing that is to be seen may come from a cache."""
        return None
