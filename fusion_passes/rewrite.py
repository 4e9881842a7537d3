"""One site becomes one call of the fused op. Nothing here decides anything."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.immutable_collections import immutable_list

import custom_ops  # noqa: F401  registers the op
from custom_ops.pattern_codes import PATTERNS
from fusion_passes.config import FusionConfig
from fusion_passes.patterns import bind, is_contiguous, same_shape, value
from fusion_passes.rules import Rule
from fusion_passes.sites import Site

aten = torch.ops.aten
FUSED_OP = torch.ops.custom_ops.call_trtllm_fused_allreduce_norm.default
_OUTPUTS = tuple(
    argument.name
    for argument in FUSED_OP._schema.arguments
    if argument.alias_info is not None and argument.alias_info.is_write
)


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
    replaced = {"norm_out": site.norm.out, "residual_out": site.total}
    builder = _Builder(graph, site)
    with graph.inserting_before(site.total):
        x, residual = builder.fold(site)
        buffers = {
            name: builder.empty_like(x if residual is None else residual, replaced[name])
            for name in sorted(PATTERNS[rule.pattern_code].outputs)
        }
        call = builder.call(_arguments(site, rule, world_size, config), x, residual, buffers)
        outputs = {name: builder.item(call, 1 + index) for index, name in enumerate(buffers)}
    with graph.inserting_before(site.norm.out):
        norm = builder.reshaped_like(outputs["norm_out"], site)
    site.norm.out.replace_all_uses_with(norm)
    site.total.replace_all_uses_with(outputs["residual_out"])
    _erase_dead(graph, site)
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
        "scale_factor": None,
        "group_name": site.all_reduce.group,
        "weight_bias": site.norm.weight_bias,
        "rms_eps_tensor": eps if isinstance(eps, Node) else None,
        "pdl_advance_launch_tokens": config.pdl_advance_launch_tokens,
    }


class _Builder:
    """Makes nodes that carry what later passes look at: the fake value, the stack trace and the module path."""

    def __init__(self, graph: Graph, site: Site) -> None:
        self.graph = graph
        self.origin = site.norm.out
        found = value(site.all_reduce.result)
        assert found is not None
        self.fake_mode = found.fake_mode  # type: ignore[attr-defined]

    def empty_like(self, like: Node, instead_of: Node) -> Node:
        """A contiguous buffer of the shape and type of a node, for what another node held until now."""
        mine, its = value(like), value(instead_of)
        assert mine is not None
        # The fake value of the node that goes is one like it; a new one would take most of the time of a rewrite.
        reusable = its is not None and same_shape(mine, its) and is_contiguous(its)
        return self._node(
            aten.empty_like.default, (like,), {"memory_format": torch.contiguous_format}, its if reusable else None
        )

    def item(self, of: Node, index: int) -> Node:
        """One output of a call."""
        return self._node(operator.getitem, (of, index), {}, of.meta["val"][index])

    def fold(self, site: Site) -> tuple[Node, Node | None]:
        """(contribution, residual): what the steps of a site do to its sum, done to the inputs of the op."""
        x: Node = site.all_reduce.input
        residual: Node | None = None
        for step in site.steps:
            operand = self._node(aten.mm.default, step.product, {}) if step.product else step.operand
            residual = residual and self._reshaped_like(residual, step.before)
            if step.adds and isinstance(operand, Node):
                residual = operand if residual is None else self._node(aten.add.Tensor, (operand, residual), {})
            elif not step.does_nothing:
                x = self._node(step.operator.target, (x, operand), {})
                residual = None if residual is None else self._node(step.operator.target, (residual, operand), {})
        return x, residual if residual is None else self._broadcast(residual, x, site.total)

    def _reshaped_like(self, addend: Node, view: Node) -> Node:
        """What was added before a reshape, reshaped in turn; a bias still fits."""
        found = value(addend)
        if view.target is not aten.reshape.default or found is None or found.dim() <= 1:
            return addend
        return self._reshape(addend, view)

    def _broadcast(self, residual: Node, x: Node, total: Node) -> Node:
        """The residual in the shape of the total, which is that of x where it is not that of the residual."""
        mine, wanted = value(residual), value(total)
        assert mine is not None
        assert wanted is not None
        if same_shape(mine, wanted):
            return residual
        return self._node(aten.copy.default, (self._node(aten.empty_like.default, (x,), {}), residual), {})

    def call(self, arguments: dict[str, Any], x: Node, residual: Node | None, buffers: dict[str, Node]) -> Node:
        """The functional form of the fused op; its outputs are those of the op (none), then the buffers."""
        places = {name: index for index, name in enumerate(buffers)}
        kwargs = {"allreduce_in": x, "residual": residual, **arguments}
        for name in _OUTPUTS:
            kwargs[f"_{name}_base_index"] = places.get(name)
        kwargs["_all_bases"] = list(buffers.values())
        vals = (None, *(buffer.meta["val"] for buffer in buffers.values()))
        node = self._node(auto_functionalized_v2, (FUSED_OP,), kwargs, vals)
        # What the op would see in eager mode: Inductor lays its inputs out like this.
        eager = {key: self._contiguous(arg) if isinstance(arg, Node) else arg for key, arg in kwargs.items()}
        eager["_all_bases"] = immutable_list(vals[1:])
        node.meta["eager_input_vals"] = ((FUSED_OP,), eager)
        return node

    def reshaped_like(self, norm: Node, site: Site) -> Node:
        """The norm output in the shape of the norm that it replaces."""
        return norm if site.norm.x is site.total else self._reshape(norm, site.norm.x)

    def _reshape(self, node: Node, like: Node) -> Node:
        """A node in the shape that another one is given by a reshape."""
        (_, _), (size, _) = bind(like)
        return self._node(aten.reshape.default, (node, size), {})

    def _contiguous(self, node: Node) -> Any:
        found = value(node)
        if found is None or is_contiguous(found):
            return node.meta["val"]
        with self.fake_mode:
            return found.contiguous()

    def _node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any = None) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        if val is None:
            fakes = torch.fx.map_arg(args, lambda arg: arg.meta["val"])
            with self.fake_mode:
                val = target(*fakes, **kwargs)
        node.meta["val"] = val
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
            if key in self.origin.meta:
                node.meta[key] = self.origin.meta[key]
        return node


def _erase_dead(graph: Graph, site: Site) -> None:
    """Remove what the op replaced, and what only that needed."""
    own = (site.all_reduce.node, site.all_reduce.result)
    pending = [site.norm.out, site.total]
    while pending:
        node = pending.pop()
        if node.users or node._erased or not (node in own or _is_pure(node.target)):
            continue
        pending += node.all_input_nodes
        graph.erase_node(node)


@cache
def _is_pure(target: Any) -> bool:
    """Whether a call of an operator that nothing uses can go; other operators than PyTorch's own stay."""
    ours = isinstance(target, OpOverload) and target.namespace in ("aten", "prims")
    return ours and not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
