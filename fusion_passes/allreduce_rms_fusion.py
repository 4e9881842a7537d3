"""The pass: recognise, decide, rewrite, report."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

import custom_ops
from custom_ops import flashinfer_adapter
from fusion_passes import (
    collective_checks,
    collectives,
    compat,
    eligibility,
    overlap,
    quant_choice,
    reporting,
    rules,
    sites,
)
from fusion_passes.collectives import AllReduce
from fusion_passes.config import FusionConfig
from fusion_passes.environment import Environment
from fusion_passes.overlap import Overlap
from fusion_passes.reasons import NotFused
from fusion_passes.reporting import SiteReport
from fusion_passes.rewrite import rewrite
from fusion_passes.rules import Rule
from fusion_passes.sites import Site, Surroundings
from fusion_passes.steps import are_exact

Decision = Site | Overlap | NotFused


class AllReduceRMSFusionPass(compat.GraphPass):  # type: ignore[misc]
    """Rewrites all-reduce, residual add and RMSNorm into one op, in inference graphs.

    It is a post-grad pass of Inductor; see fusion_passes.api for how to install it.
    """

    def __init__(self, config: FusionConfig | None = None, environment: Environment | None = None) -> None:
        self.config = (config or FusionConfig()).resolved()
        self.environment = environment or Environment()
        path = self.config.tuning_profile
        self.profile = custom_ops.use_profile(path) if path and self.config.fuse_allreduce_rms else None

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Rewrite a graph in place; one without a site that fuses is left exactly as it is.

        Raises:
            FusionError: the configuration is strict, and a fusion was missed; the graph is as it was.
        """
        nodes = collectives.find(graph)
        if not nodes:
            return
        name = compat.graph_name()
        inference = compat.is_inference_graph(graph) if is_inference is None else is_inference
        decisions = self.decide(graph, nodes, inference)
        reports = [self._verdict(node, name, decision) for node, decision in decisions]
        if self.config.strict:
            reporting.require(reports)
        served = [decision for _, decision in decisions if not isinstance(decision, NotFused)]
        in_order = [self.replace(graph, one) for one in served]
        if not all(in_order):
            stable_topological_sort(graph)
        self.publish(name, reports)

    def decide(self, graph: Graph, nodes: list[Node], is_inference: bool) -> list[tuple[Node, Decision]]:
        """What becomes of every all-reduce, or why nothing, in the order of the graph, which is not changed."""
        if not self.config.fuse_allreduce_rms:
            return [(node, NotFused("disabled", "fuse_allreduce_rms is off")) for node in nodes]
        if not is_inference:
            text = "the graph saves values for a backward pass; compile under torch.no_grad()"
            return [(node, NotFused("training_graph", text)) for node in nodes]
        around = Surroundings(graph)
        claimed: set[Node] = set()
        decisions: list[tuple[Node, Decision]] = []
        # From the last: of two all-reduces that meet in one add, the later one is there when the norm starts.
        for node in reversed(nodes):
            decision = self._decide_one(node, around, claimed)
            if isinstance(decision, Site):
                claimed.add(decision.total)
            decisions.insert(0, (node, decision))
        return decisions

    def _decide_one(self, node: Node, around: Surroundings, claimed: set[Node]) -> Decision:
        found = collectives.recognise(node)
        if not isinstance(found, AllReduce):
            return found
        site = None if self.config.norm_path == "overlap" else self._decide_site(found, around, claimed)
        if self.config.norm_path == "fused":
            assert site is not None
            return site
        question = collective_checks.CollectiveQuestion(found, self.config, self.environment)
        if isinstance(site, Site):
            faster = collective_checks.overlap_is_faster(question)
            return site if faster is None else Overlap(found, faster)
        return collective_checks.refusal(question) or Overlap(found, site)

    def _decide_site(self, found: AllReduce, around: Surroundings, claimed: set[Node]) -> Site | NotFused:
        site = sites.assemble(found, around, claimed)
        if not isinstance(site, Site):
            return site
        question = eligibility.Question(found, self.config, self.environment, site, around)
        if refusal := eligibility.refusal(question):
            return refusal
        choice, left = quant_choice.choose(question)
        if site.norm.wide and (choice is None or choice.norm_used):
            return left or NotFused(
                "norm_not_recognised", f"{site.norm.out} leaves the norm in float32; the kernel rounds it"
            )
        return replace(site, choice=choice, left=left)

    def replace(self, graph: Graph, site: Site | Overlap) -> bool:
        """Replace a site; whether the nodes are still in an order in which they can run."""
        config = self.config
        if compat.inductor_launches_with_pdl():
            # Its kernels wait for what they read of their direct predecessor, and for nothing before (docs/pdl.md).
            config = replace(config, pdl_advance_launch_tokens=0)
        if isinstance(site, Overlap):
            overlap.rewrite(graph, site, config)
            return True
        world_size = self.environment.world_size(site.all_reduce.group)
        call = rewrite(graph, site, _rule_of(site), world_size, config)
        # What was made for the call stands right before it, but may be made of something that comes later.
        made = (call, *call.all_input_nodes)
        return all(arg < call for node in made for arg in node.all_input_nodes)

    def _verdict(self, node: Node, graph: str, decision: Decision) -> SiteReport:
        if isinstance(decision, Overlap):
            return reporting.verdict(node, graph, overlap.RULE, decision.left)
        if not isinstance(decision, Site):
            return reporting.verdict(node, graph, decision)
        return reporting.verdict(node, graph, _rule_of(decision).name, decision.left)

    def publish(self, graph: str, sites: list[SiteReport]) -> None:
        """Tell what became of the all-reduces of a graph."""
        reporting.publish(graph, sites)

    def uuid(self) -> Any:
        """Changes with the sources, the configuration, its profile and the versions of torch and FlashInfer."""
        profile = self.profile.digest if self.profile else ""
        parts = (_source_digest(), repr(self.config), profile, compat.TORCH_VERSION, str(flashinfer_adapter.version()))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _rule_of(site: Site) -> Rule:
    residual, folded, choice = bool(site.addends), not are_exact(site.steps), site.choice
    if choice is None:
        return rules.pick(residual, folded)
    return rules.pick(residual, folded, choice.one.quantisation.format.name, choice.norm_used)


@cache
def _source_digest() -> str:
    """Digest of the sources of both packages, wherever they are installed."""
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _sources() -> Iterator[Path]:
    for package in ("custom_ops", "fusion_passes"):
        spec = find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            yield from sorted(path for kind in ("*.py", "*.json") for path in Path(folder).rglob(kind))
