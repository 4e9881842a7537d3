"""One site becomes one call of the fused op. Nothing here decides anything."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

import custom_ops  # noqa: F401  registers the op
from custom_ops.pattern_codes import PATTERNS
from fusion_passes import quant_ops
from fusion_passes.builder import EXPONENTS, Builder
from fusion_passes.config import FusionConfig
from fusion_passes.patterns import same_shape, value
from fusion_passes.quants import Quant
from fusion_passes.rules import Rule
from fusion_passes.sites import Site, views_of
from fusion_passes.spare import is_sized, is_spare

aten = torch.ops.aten
FUSED_OP = torch.ops.custom_ops.call_trtllm_fused_allreduce_norm.default


def rewrite(graph: Graph, site: Site, rule: Rule, world_size: int, config: FusionConfig) -> Node:
    """Replace a site by the fused op and return the node of its call.

    The op writes into fresh buffers and stays functional until Inductor reinplaces it, so that every later pass sees a
    functional graph. The graph may need a topological sort afterwards: a weight computed behind the add now comes
    before it.

    Args:
        graph: the graph of the site.
        site: what to replace.
        rule: how.
        world_size: ranks of the group.
        config: flags of the call.
    """
    builder = _SiteBuilder(graph, site.norm.out, site)
    with graph.inserting_before(site.total):
        x, residual = builder.fold()
        buffers = builder.buffers(x, x if residual is None else residual, rule)
        arguments = {**_arguments(site, rule, world_size, config), **builder.quant_arguments()}
        call = builder.mutating(FUSED_OP, {"allreduce_in": x, "residual": residual, **arguments}, buffers)
        outputs = {name: builder.item(call, 1 + index) for index, name in enumerate(buffers)}
    replaced = builder.quantised(outputs)
    if "norm_out" in outputs:
        with graph.inserting_before(site.norm.out):
            replaced[site.norm.out] = builder.like_norm(outputs["norm_out"])
    else:
        builder.ask_sizes_of(outputs["residual_out"])
    for old, new in (*replaced.items(), (site.total, outputs["residual_out"])):
        old.replace_all_uses_with(new)
    _erase_dead(graph, site, list(replaced))
    return call


def _arguments(site: Site, rule: Rule, world_size: int, config: FusionConfig) -> dict[str, Any]:
    """Arguments of the op by name, but for its tensors of activations."""
    eps = site.norm.eps
    return {
        "rms_gamma": site.norm.weight,
        "rms_eps": 0.0 if isinstance(eps, Node) else float(eps),
        "world_size": world_size,
        "launch_with_pdl": config.launch_with_pdl,
        "fp32_acc": config.fp32_acc,
        "max_token_num": config.max_token_num or 0,
        "pattern_code": rule.pattern_code,
        "group_name": site.all_reduce.group,
        "weight_bias": site.norm.weight_bias,
        "rms_eps_tensor": eps if isinstance(eps, Node) else None,
        "pdl_advance_launch_tokens": config.pdl_advance_launch_tokens,
        "backend": config.backend,
        "check_ranks": config.check_ranks,
    }


class _SiteBuilder(Builder):
    """Makes the nodes of one site."""

    def __init__(self, graph: Graph, origin: Node, site: Site) -> None:
        super().__init__(graph, origin)
        self.site = site

    def fold(self) -> tuple[Node, Node | None]:
        """(contribution, residual): what the steps of the site do to its sum, done to the inputs of the op."""
        site = self.site
        x: Node = site.all_reduce.input
        residual: Node | None = None
        for step in site.steps:
            operand = self.node(aten.mm.default, step.product, {}) if step.product else step.operand
            residual = residual and self._reshaped_like(residual, step.before)
            if step.adds and isinstance(operand, Node):
                residual = operand if residual is None else self.node(aten.add.Tensor, (operand, residual), {})
            elif not step.does_nothing:
                x = self.node(step.operator.target, (x, operand), {})
                residual = None if residual is None else self.node(step.operator.target, (residual, operand), {})
        return x, residual if residual is None else self._broadcast(residual, x, site.total)

    def buffers(self, x: Node, like: Node, rule: Rule) -> dict[str, Node]:
        """The tensors that the op writes, by name."""
        site, outputs, made = self.site, PATTERNS[rule.pattern_code].outputs, {}
        quant = None if site.choice is None else site.choice.one
        if "norm_out" in outputs:
            made["norm_out"] = self.empty_like(like, site.norm.out)
        if quant is not None:
            made["quant_out"] = self.values(like, quant.quantisation, quant.values)
        made["residual_out"] = self._total_buffer(like, x)
        if quant is not None and "scale_out" in outputs:
            made["scale_out"] = self.scales(like, quant.quantisation, quant.scale_out or quant.values)
        return made

    def _total_buffer(self, like: Node, x: Node) -> Node:
        """What the sum and residual are written to.

        Of a size that is not known yet the op may turn out to be above the limit; it is then reduced where it lies.
        """
        mine, total, user = value(x), value(self.site.total), self.site.all_reduce.node
        assert mine is not None
        assert total is not None
        if not is_sized(mine) and same_shape(mine, total) and is_spare(x, user):
            return x
        return self.empty_like(like, self.site.total)

    def quant_arguments(self) -> dict[str, Any]:
        """Arguments of the op by name that say how to quantise."""
        names = ("scale_factor", "layout_code", "block_quant_group_size")
        if self.site.choice is None:
            return dict.fromkeys(names)
        one, x = self.site.choice.one, value(self.site.all_reduce.input)
        assert x is not None
        quantisation = one.quantisation
        scale = None if one.scale is None else self.scale(one.scale, x.device)
        layout = quantisation.layout.value if quantisation.format.layouts else None
        group = None if quantisation.format.layouts else quantisation.block or None
        return dict(zip(names, (scale, layout, group), strict=True))

    def quantised(self, outputs: dict[str, Node]) -> dict[Node, Node]:
        """What takes the place of the nodes of all quantisations."""
        replaced: dict[Node, Node] = {}
        for quant in () if self.site.choice is None else self.site.choice.quants:
            with self.graph.inserting_before(quant.values):
                replaced[quant.values] = self._viewed(outputs["quant_out"], quant.x)
            if quant.scale_out is not None:
                with self.graph.inserting_before(quant.scale_out):
                    replaced[quant.scale_out] = self._scales(outputs["scale_out"], quant)
        return replaced

    def ask_sizes_of(self, total: Node) -> None:
        """Ask the new residual for the sizes that are asked of the norm, which is not written."""
        for view in views_of(self.site.norm.out):
            for user in [user for user in view.users if user.target is aten.sym_size.int]:
                with self.graph.inserting_before(user):
                    user.replace_input_with(view, self._viewed(total, view))

    def _scales(self, scales: Node, quant: Quant) -> Node:
        """The scales of the op in the shape of those of a quantisation."""
        found, x = value(quant.scale_out) if quant.scale_out else None, value(quant.x)
        assert found is not None
        assert x is not None
        if quant.quantisation.block:
            return self.as_exponents(scales) if found.dtype is EXPONENTS else scales
        viewed = self._viewed(scales, quant.x)
        return viewed if found.dim() == x.dim() else self.node(aten.squeeze.dim, (viewed, -1), {})

    def _viewed(self, node: Node, x: Node) -> Node:
        """A node in the shape of the norm that it replaces, and then of a reshape of that."""
        shaped = self.like_norm(node)
        return shaped if x is self.site.norm.out else self.reshape(shaped, x)

    def like_norm(self, node: Node) -> Node:
        """A node in the shape of the norm."""
        return node if self.site.norm.x is self.site.total else self.reshape(node, self.site.norm.x)

    def _reshaped_like(self, addend: Node, view: Node) -> Node:
        """What was added before a reshape, reshaped in turn; a bias still fits."""
        found = value(addend)
        if view.target is not aten.reshape.default or found is None or found.dim() <= 1:
            return addend
        return self.reshape(addend, view)

    def _broadcast(self, residual: Node, x: Node, total: Node) -> Node:
        """The residual in the shape of the total, which is that of x where it is not that of the residual."""
        mine, wanted = value(residual), value(total)
        assert mine is not None
        assert wanted is not None
        if same_shape(mine, wanted):
            return residual
        return self.node(aten.copy.default, (self.node(aten.empty_like.default, (x,), {}), residual), {})


def _erase_dead(graph: Graph, site: Site, replaced: list[Node]) -> None:
    """Remove what the op replaced, and what only that needed."""
    own = (site.all_reduce.node, site.all_reduce.result)
    pending = [site.total, site.norm.out, *replaced]
    while pending:
        node = pending.pop()
        if node.users or node._erased or not (node in own or _is_pure(node.target) or quant_ops.is_pure(node.target)):
            continue
        pending += node.all_input_nodes
        graph.erase_node(node)


@cache
def _is_pure(target: Any) -> bool:
    """Whether a call of an operator that nothing uses can go; other operators than PyTorch's own stay."""
    ours = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    return ours and not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
