"""Operators that quantise by themselves: one row each, by name, so that none need be installed."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload
from torch.fx import Node

from custom_ops import formats
from custom_ops.formats import Quantisation
from fusion_passes.patterns import bind, value


@dataclass(frozen=True)
class Operator:
    """What an operator does.

    Attributes:
        quantisation: (format with its choices, from its arguments but the tensor).
        scale: place of the given scale among its arguments; None where it takes none.
        values: place of the values among its outputs; None where it has one output.
        scales: place of the scales among its outputs.
        exact: whether it rounds as the kernel does.
    """

    quantisation: Callable[[list[Any]], Quantisation]
    scale: int | None = None
    values: int | None = None
    scales: int | None = None
    exact: bool = True


@dataclass(frozen=True)
class Call:
    """A call of such an operator."""

    quantisation: Quantisation
    x: Node
    values: Node
    scale: Node | float | None
    scale_out: Node | None
    exact: bool
    nodes: tuple[Node, ...]


OPERATORS: dict[str, Operator] = {
    "custom_ops::scaled_fp8_quant.static": Operator(lambda args: formats.choose("fp8"), scale=1),
    "custom_ops::scaled_fp8_quant.per_token": Operator(lambda args: formats.choose("fp8_token"), values=0, scales=1),
    "custom_ops::scaled_fp8_quant.per_group": Operator(
        lambda args: formats.choose("fp8_group", group_size=args[1]), values=0, scales=1
    ),
    "custom_ops::mxfp8_quant": Operator(lambda args: formats.choose("mxfp8", layout_code=args[1]), values=0, scales=1),
    "custom_ops::scaled_fp4_quant": Operator(
        lambda args: formats.choose("nvfp4", layout_code=args[2]), scale=1, values=0, scales=1
    ),
    # torchao; the second is its default for NVFP4, whose global scale is the one the kernel takes.
    "torchao::quantize_affine_float8_non_decomposed": Operator(
        lambda args: formats.choose("fp8"), scale=1, exact=False
    ),
    "ao::mslk_quantize_nvfp4": Operator(lambda args: formats.choose("nvfp4"), scale=1, values=1, scales=0, exact=False),
}
"""Every operator by its name. A new one is a row and a golden test."""


def is_known(node: Node) -> bool:
    """Whether a node is a call of one of OPERATORS."""
    return isinstance(node.target, OpOverload) and node.target.name() in OPERATORS


def recognise(node: Node) -> Call | None:
    """The call of a node; None where its values are not float8 or packed float4, or its outputs are used as a whole."""
    assert isinstance(node.target, OpOverload)
    row = OPERATORS[node.target.name()]
    args = [found for found, _ in bind(node)]
    outputs = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    values = node if row.values is None else outputs.get(row.values)
    # Without a global scale NVFP4 is quantised as if it were one.
    scale = None if row.scale is None else 1.0 if args[row.scale] is None else args[row.scale]
    quantisation = row.quantisation(args)
    found = None if values is None else value(values)
    if values is None or found is None or found.dtype != quantisation.format.dtype:
        return None
    if row.values is not None and len(outputs) != len(node.users):
        return None
    scale_out = None if row.scales is None else outputs.get(row.scales)
    return Call(quantisation, args[0], values, scale, scale_out, row.exact, (node, *outputs.values()))


def is_pure(target: Any) -> bool:
    """Whether a call can go when nothing uses it."""
    if target is operator.getitem:
        return True
    return isinstance(target, OpOverload) and target.name() in OPERATORS and not target._schema.is_mutable
