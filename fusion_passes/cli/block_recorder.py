"""The pass with a window on one block: the text of a fused site before and after."""

from __future__ import annotations

from torch.fx import Graph, Node

from fusion_passes import collectives, graph_text
from fusion_passes.allreduce_rms_fusion import AllReduceRMSFusionPass
from fusion_passes.config import FusionConfig
from fusion_passes.sites import Site


class BlockRecorder(AllReduceRMSFusionPass):
    """Fuses like its parent and keeps the text of the second site that it fuses (the first may lack a residual).

    Attributes:
        before: the nodes from the all-reduce's input to the norm.
        after: the nodes that took their place.
    """

    def __init__(self, config: FusionConfig | None = None) -> None:
        super().__init__(config)
        self.before = self.after = ""

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Rewrite a graph in place and record one of its blocks."""
        decisions = self.decide(graph, collectives.find(graph), is_inference is not False)
        sites = [decision for _, decision in decisions if isinstance(decision, Site)]
        if not sites or self.before:
            super().__call__(graph, is_inference)
            return
        site = sites[min(1, len(sites) - 1)]
        first = site.all_reduce.input
        self.before = graph_text.render_nodes(_between(first, site.norm.out))
        super().__call__(graph, is_inference)
        # What replaced the site reads its input and ends in the outputs of the op.
        call = next(user for user in first.users if "auto_functionalized" in str(user.target))
        self.after = graph_text.render_nodes(_between(first, list(call.users)[-1]))


def _between(first: Node, last: Node) -> list[Node]:
    nodes = [first]
    while nodes[-1] is not last:
        nodes.append(nodes[-1].next)
    return nodes
