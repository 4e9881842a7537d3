"""Run torch.compile up to and including Inductor's post-grad passes, and execute the resulting graph without codegen.

The graph at the hook is the one that stock Inductor shows there: the same compile_fx, AOTAutograd and post-grad passes
run; only the lowering to C++ or Triton is left out. So a test sees the text before and after, and the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule

import fusion_passes
from fusion_passes import compat, graph_text


@dataclass
class Captured:
    """What one compilation showed.

    Attributes:
        before: text of each graph as the pass finds it.
        after: text of each graph as the pass leaves it.
        final: text of each graph after all post-grad passes.
        sites: verdicts for all all-reduces of all graphs.
        result: what the call returned.
    """

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    final: list[str] = field(default_factory=list)
    sites: list[fusion_passes.SiteReport] = field(default_factory=list)
    result: Any = None

    @property
    def rules(self) -> list[str]:
        """Rule or reason code of each site."""
        return [site.rule or (site.reason.code if site.reason else "") for site in self.sites]


def capture(
    fn: Callable[..., Any],
    *inputs: Any,
    config: fusion_passes.FusionConfig | None = None,
    dynamic: bool | None = None,
    no_grad: bool = True,
    fullgraph: bool = True,
    passes: Sequence[compat.Pass] | None = None,
    **kwargs: Any,
) -> Captured:
    """Compile and call a function, in a fresh Dynamo, and return what was seen."""
    captured = Captured()
    ours = (fusion_passes.AllReduceRMSFusionPass(config),) if passes is None else tuple(passes)
    hook = compat.as_hook((_Snapshot(captured.before), *ours, _Snapshot(captured.after)))

    def inner(gm: GraphModule, example_inputs: Sequence[Any], **flags: Any) -> Any:
        inductor.view_to_reshape(gm)
        with torch.no_grad():
            fake_mode = inductor.fake_tensor_prop(gm, example_inputs)
        with V.set_fake_mode(fake_mode):
            inductor._recursive_post_grad_passes(gm, is_inference=flags.get("is_inference", False))
        captured.final.append(graph_text.render(gm.graph))
        gm.recompile()
        return make_boxed_func(gm.forward)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        return inductor.compile_fx(gm, example_inputs, inner_compile=inner)

    torch._dynamo.reset()
    fusion_passes.reset_report()
    with (
        torch.set_grad_enabled(not no_grad),
        inductor_config.patch(post_grad_custom_post_pass=hook, force_disable_caches=True),
    ):
        compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
        captured.result = compiled(*inputs, **kwargs)
    captured.sites = fusion_passes.report()
    return captured


class _Snapshot(compat.CustomGraphPass):
    def __init__(self, into: list[str]) -> None:
        self.into = into

    def __call__(self, graph: Graph) -> None:
        self.into.append(graph_text.render(graph))

    def uuid(self) -> str:
        return "snapshot"
