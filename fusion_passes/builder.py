"""Makes nodes that carry what later passes look at: the fake value, the stack trace and the module path."""

from __future__ import annotations

import math
import operator
from functools import cache
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._ops import OpOverload
from torch.fx import Graph, Node, Proxy
from torch.fx.immutable_collections import immutable_list

from custom_ops.formats import Quantisation
from fusion_passes.patterns import CAST, bind, is_contiguous, same_shape, value
from fusion_passes.scales import Scale

aten = torch.ops.aten
EXPONENTS = torch.float8_e8m0fnu
_EMPTY = (aten.empty_like.default, aten.empty_strided.default)
_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack")


@cache
def _written_by(op: OpOverload) -> tuple[str, ...]:
    arguments = op._schema.arguments
    return tuple(one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write)


class Builder:
    """Makes nodes where the graph inserts now; they come from where one node came from."""

    def __init__(self, graph: Graph, origin: Node) -> None:
        self.graph = graph
        self.origin = origin
        found = value(origin)
        assert found is not None
        self.fake_mode = found.fake_mode  # type: ignore[attr-defined]

    def node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any = None) -> Node:
        """A call; its fake value is computed if none is given."""
        return self._complete(self.graph.call_function(target, args, kwargs), val)

    def _complete(self, node: Node, val: Any = None) -> Node:
        if val is None:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            with self.fake_mode:
                val = node.target(*args, **kwargs)  # type: ignore[operator]
        node.meta["val"] = val
        for key in _ORIGIN:
            if key in self.origin.meta:
                node.meta[key] = self.origin.meta[key]
        return node

    def lay_out_contiguously(self, call: Node) -> None:
        """Note what an operator would see in eager mode: Inductor lays its inputs out like this."""
        seen = torch.fx.map_arg((call.args, call.kwargs), self.contiguous)
        call.meta["eager_input_vals"] = seen

    def mutating(self, op: OpOverload, arguments: dict[str, Any], bases: dict[str, Node]) -> Node:
        """The functional form of an operator that returns nothing and writes some of its arguments, whole tensors each.

        Its outputs are None and then the new value of each base.

        Args:
            op: the operator.
            arguments: by name, but for those that it writes.
            bases: those, by name; what is not here is None.
        """
        places = {name: index for index, name in enumerate(bases)}
        kwargs = dict(arguments)
        for name in _written_by(op):
            kwargs[f"_{name}_base_index"] = places.get(name)
        kwargs["_all_bases"] = list(bases.values())
        # A new value of a buffer may be that of the buffer; that of a tensor with a value of its own is another one.
        vals = (None, *(base.meta["val"] if base.target in _EMPTY else self._another(base) for base in bases.values()))
        node = self.node(auto_functionalized_v2, (op,), kwargs, vals)
        # What the operator would see in eager mode: Inductor lays its inputs out like this.
        eager = {key: self.contiguous(arg) if isinstance(arg, Node) else arg for key, arg in kwargs.items()}
        eager["_all_bases"] = immutable_list(vals[1:])
        node.meta["eager_input_vals"] = ((op,), eager)
        return node

    def _another(self, node: Node) -> Any:
        """A fake value like that of a node, in memory of its own."""
        with self.fake_mode:
            return torch.empty_like(node.meta["val"])

    def contiguous(self, node: Node) -> Any:
        """The fake value of a node, laid out contiguously."""
        found = value(node)
        if found is None or is_contiguous(found):
            return node.meta["val"]
        with self.fake_mode:
            return found.contiguous()

    def empty_like(self, like: Node, instead_of: Node, dtype: torch.dtype | None = None) -> Node:
        """A contiguous buffer of the shape of a node, for what another node held until now; of its type, or another."""
        mine, its = value(like), value(instead_of)
        assert mine is not None
        # The fake value of the node that goes is one like it; a new one would take most of the time of a rewrite.
        same = its is not None and its.dtype == (dtype or mine.dtype) and same_shape(mine, its)
        reusable = same and its is not None and is_contiguous(its)
        kwargs = {"memory_format": torch.contiguous_format, **({} if dtype is None else {"dtype": dtype})}
        return self.node(aten.empty_like.default, (like,), kwargs, its if reusable else None)

    def item(self, of: Node, index: int) -> Node:
        """One output of a call."""
        return self.node(operator.getitem, (of, index), {}, of.meta["val"][index])

    def reshape(self, node: Node, like: Node) -> Node:
        """A node in the shape that another one is given by a reshape, but for the last dimension, which stays."""
        (_, _), (size, _) = bind(like)
        mine = value(node)
        assert mine is not None
        return self.node(aten.reshape.default, (node, [*size[:-1], mine.shape[-1]]), {})

    def values(self, like: Node, quantisation: Quantisation, instead_of: Node) -> Node:
        """A buffer for the quantised values of a tensor, in its shape."""
        found = quantisation.format
        width = self._hidden(like) // found.values
        return self.empty_like(self._columns(like, width), instead_of, found.dtype)

    def scales(self, like: Node, quantisation: Quantisation, instead_of: Node) -> Node:
        """A buffer for the scales of a tensor: in its shape where there is one a row."""
        mine = value(like)
        assert mine is not None
        if not quantisation.block:
            return self.empty_like(self._columns(like, 1), instead_of, torch.float32)
        buffer = quantisation.scales(self._tokens(like), self._hidden(like))
        assert buffer is not None
        sizes = [[self._settled(size) for size in sizes] for sizes in (buffer.shape, buffer.stride)]
        # Inductor leaves a call with exponents among its tensors as it is; as bytes they are written all the same.
        dtype = torch.uint8 if buffer.dtype is EXPONENTS else buffer.dtype
        return self.node(aten.empty_strided.default, tuple(sizes), {"dtype": dtype, "device": mine.device})

    def as_exponents(self, scales: Node) -> Node:
        """Bytes as what they are."""
        return self.node(aten.view.dtype, (scales, EXPONENTS), {})

    def scale(self, scale: Scale, device: torch.device) -> Node:
        """What the kernel reads a given scale from: one float32 on the device."""
        source = scale.source
        if not isinstance(source, Node):
            number = 1 / source if scale.inverted else source
            return self.node(aten.full.default, ([1], number), {"dtype": torch.float32, "device": device})
        found = value(source)
        if found is not None and found.dtype != torch.float32:
            source = self.node(CAST, (source, torch.float32), {})
        return self.node(aten.reciprocal.default, (source,), {}) if scale.inverted else source

    def _hidden(self, like: Node) -> int:
        found = value(like)
        assert found is not None
        return int(found.shape[-1])

    def _columns(self, like: Node, width: int) -> Node:
        """The first columns of a tensor, for their shape."""
        if width == self._hidden(like):
            return like
        return self.node(aten.slice.Tensor, (like, -1, 0, width), {})

    def _tokens(self, like: Node) -> Any:
        """Rows of a tensor: a number, or a proxy whose arithmetic becomes nodes."""
        found = value(like)
        assert found is not None
        sizes = [
            size if isinstance(size, int) else Proxy(self.node(aten.sym_size.int, (like, place), {}, size))
            for place, size in enumerate(found.shape[:-1])
        ]
        return math.prod(sizes[1:], start=sizes[0]) if sizes else 1

    def _settled(self, size: Any) -> Any:
        """The node of a size that is a proxy, with the values of all nodes that its arithmetic made."""
        if not isinstance(size, Proxy):
            return size
        pending = [size.node]
        while pending:
            missing = [arg for arg in pending[-1].all_input_nodes if "val" not in arg.meta]
            pending += missing
            if not missing and "val" not in (node := pending.pop()).meta:
                self._complete(node)
        return size.node
