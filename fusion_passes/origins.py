"""Where a node comes from: the path of its module and the line of model code."""

from __future__ import annotations

import re

from torch.fx import Node


def module_of(node: Node) -> str:
    """Path of the innermost module, such as "model.layers.0.mlp.down_proj"; "" if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return re.sub(r"^[LG]\['\w+'\]\.?", "", path)


def source_of(node: Node) -> str:
    """File and line, joined by a colon, of the innermost frame outside of PyTorch, or else of all; "" if unknown."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace") or "").splitlines()]
    frames = [line.split('"')[1::2] + line.split(", line ")[1:] for line in lines if line.startswith('File "')]
    places = [f"{frame[0]}:{frame[-1].split(',')[0]}" for frame in frames if len(frame) >= 2]
    outside = [place for place in places if "/torch/" not in place]
    return (outside or places or [""])[-1]
