"""A graph as text, one node a line: name, type and shape, operator, arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fusion_passes.origins import module_of, source_of

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64", torch.bool: "b8"}
_HOP_NOISE = ("_base_index", "_all_bases")


@dataclass(frozen=True)
class Line:
    """One node as text, with where it comes from.

    Attributes:
        name: of the node.
        text: name, type and shape, operator, arguments.
        type: type and shape alone.
        module: path of its module; "" if unknown.
        source: "file:line" of model code; "" if unknown.
        site: name of the all-reduce that the node is fused with, or is; "" for others.
    """

    name: str
    text: str
    type: str
    module: str = ""
    source: str = ""
    site: str = ""


def lines(graph: Graph) -> list[Line]:
    """All nodes of a graph but the inputs that nothing uses."""
    shown = (node for node in graph.nodes if node.op != "placeholder" or node.users)
    return [Line(node.name, _line(node), type_of(node), module_of(node), source_of(node)) for node in shown]


def render(graph: Graph) -> str:
    """All nodes of a graph but the inputs that nothing uses, one a line."""
    return "\n".join(_line(node) for node in graph.nodes if node.op != "placeholder" or node.users)


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
