"""A graph as text, one node a line: name, type and shape, operator, arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64", torch.bool: "b8"}
_HOP_NOISE = ("_base_index", "_all_bases")


def render(graph: Graph) -> str:
    """All nodes of a graph but the inputs that nothing uses."""
    return render_nodes(node for node in graph.nodes if node.op != "placeholder" or node.users)


def render_nodes(nodes: Iterable[Node]) -> str:
    """Some nodes, one a line."""
    return "\n".join(_line(node) for node in nodes)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_show(node.args[0])}"
    left = f"{node.name}: {type_of(node)}"
    if node.op == "placeholder":
        return left
    arguments = [_show(arg) for arg in node.args]
    arguments += [
        f"{key}={_show(arg)}" for key, arg in node.kwargs.items() if arg is not None and not key.endswith(_HOP_NOISE)
    ]
    return f"{left} = {_name(node.target)}({', '.join(arguments)})"


def type_of(node: Node) -> str:
    """Type and shape of a node, such as "bf16[2, 8, 64]"."""
    return _type(node.meta.get("val"))


def _type(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        dtype = _DTYPES.get(val.dtype, str(val.dtype).removeprefix("torch."))
        return f"{dtype}[{', '.join(map(str, val.shape))}]"
    if isinstance(val, (list, tuple)):
        return f"({', '.join(map(_type, val))})"
    return "None" if val is None else type(val).__name__


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target).removeprefix("aten.").removeprefix("prims.").removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _show(arg: Any) -> str:
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_show, arg))}]"
    if isinstance(arg, OpOverload):
        return _name(arg)
    if isinstance(arg, torch.dtype):
        return _DTYPES.get(arg, str(arg).removeprefix("torch."))
    return str(arg) if isinstance(arg, Node) else repr(arg)
