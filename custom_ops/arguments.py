"""The checks of the fused op: every one of them runs before anything is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from custom_ops import domain, formats, overlap, pattern_codes, quant_arguments
from custom_ops.pattern_codes import Pattern
from custom_ops.quant_arguments import Quantised


@dataclass(frozen=True)
class Arguments:
    """Checked arguments; tensors are contiguous, aligned [tokens, hidden] views of what was given, or copies of it.

    Attributes:
        quantised: what is quantised; None where nothing is.
        copied_input: an input had to be copied.
        copy_back: (temporary, output) for each output that is not aligned: the caller copies when all is written.
    """

    pattern: Pattern
    allreduce_in: Tensor
    residual: Tensor | None
    gamma: Tensor | None
    eps: float
    weight_bias: float
    residual_out: Tensor
    norm_out: Tensor | None
    quantised: Quantised | None
    copied_input: bool
    copy_back: tuple[tuple[Tensor, Tensor], ...]

    @property
    def tokens(self) -> int:
        """Rows of the flattened input."""
        return self.allreduce_in.shape[0]

    @property
    def is_as_given(self) -> bool:
        """Whether the kernel can work on the very tensors that were given."""
        return not self.copied_input and not self.copy_back

    @property
    def norms(self) -> bool:
        """Whether the norm is taken: to be written, or to be quantised."""
        return self.norm_out is not None or self.quantised is not None

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        return self.allreduce_in.shape[1]


def check(
    pattern_code: int,
    allreduce_in: Tensor,
    inputs: dict[str, Tensor | None],
    outputs: dict[str, Tensor | None],
    eps: float,
    weight_bias: float,
    layout_code: int | None = None,
    block_quant_group_size: int | None = None,
) -> Arguments:
    """Check and flatten the arguments of one call.

    Args:
        pattern_code: FlashInfer's pattern.
        allreduce_in: this rank's contribution, [..., hidden].
        inputs: the optional input tensors by name.
        outputs: the output tensors by name.
        eps: epsilon of the norm.
        weight_bias: added to gamma.
        layout_code: place of block scales.
        block_quant_group_size: elements that share a scale, for per-group FP8.

    Raises:
        ValueError: naming the argument, what it is and what is allowed.
    """
    pattern = pattern_codes.lookup(pattern_code)
    _check_presence(pattern, inputs, outputs)
    _check_input(allreduce_in)
    for name, value in {"rms_eps": eps, "weight_bias": weight_bias}.items():
        if not math.isfinite(value):
            raise ValueError(f"{name}={value}: must be finite")
    hidden = allreduce_in.shape[-1]
    residual, gamma = inputs["residual"], inputs["rms_gamma"]
    if residual is not None:
        _check_like(allreduce_in, "residual", residual)
    if gamma is not None:
        _check_gamma(allreduce_in, gamma)
    given = {name: tensor for name, tensor in outputs.items() if tensor is not None}
    plain = {name: tensor for name, tensor in given.items() if name in _LIKE_INPUT}
    for name, tensor in plain.items():
        _check_like(allreduce_in, name, tensor)
    views = {name: _view_output(name, tensor, hidden) for name, tensor in plain.items()}
    quantised = _check_quantised(pattern, allreduce_in, inputs, outputs, layout_code, block_quant_group_size)
    if quantised is not None:
        views["quant_out"] = quantised.out
    overlap.check({"allreduce_in": allreduce_in, **inputs}, given)
    targets = {name: view if _aligned(view) else torch.empty_like(view) for name, view in views.items()}
    flat_in = _flatten_input(allreduce_in, hidden)
    flat_residual = None if residual is None else _flatten_input(residual, hidden)
    return Arguments(
        pattern=pattern,
        allreduce_in=flat_in,
        residual=flat_residual,
        gamma=None if gamma is None else _flatten_input(gamma, hidden).view(hidden),
        eps=eps,
        weight_bias=weight_bias,
        residual_out=targets["residual_out"],
        norm_out=targets.get("norm_out"),
        quantised=quantised and replace(quantised, out=targets["quant_out"]),
        copied_input=_moved(allreduce_in, flat_in) or _moved(residual, flat_residual),
        copy_back=tuple((targets[name], view) for name, view in views.items() if targets[name] is not view),
    )


_LIKE_INPUT = ("residual_out", "norm_out")


def _check_quantised(
    pattern: Pattern,
    like: Tensor,
    inputs: dict[str, Tensor | None],
    outputs: dict[str, Tensor | None],
    layout_code: int | None,
    group_size: int | None,
) -> Quantised | None:
    if pattern.format is None:
        for name, value in {"layout_code": layout_code, "block_quant_group_size": group_size}.items():
            if value is not None:
                raise ValueError(f"{name}={value}: pattern {pattern.code} ({pattern.name}) takes none; pass None")
        return None
    quantisation = formats.choose(pattern.format, layout_code=layout_code, group_size=group_size)
    quant_out, scale = outputs["quant_out"], inputs["scale_factor"]
    assert quant_out is not None
    return quant_arguments.check(quantisation, like, quant_out, outputs["scale_out"], scale)


def host_scalar(name: str, tensor: Tensor) -> float:
    """Value of a one-element CPU tensor.

    Raises:
        ValueError: it has more elements, or reading it would wait for a device.
    """
    if tensor.numel() != 1 or tensor.device.type != "cpu":
        raise ValueError(f"{name}: shape {list(tensor.shape)} on {tensor.device}; must be one element on the CPU")
    return float(tensor.item())


def _check_presence(pattern: Pattern, inputs: dict[str, Tensor | None], outputs: dict[str, Tensor | None]) -> None:
    for name, tensor in inputs.items():
        if tensor is None and name == "scale_factor" and name in pattern.inputs:
            raise ValueError(f"{name}=None: pattern {pattern.code} ({pattern.name}) needs it; pass a tensor")
        if tensor is not None and name not in pattern.inputs:
            raise ValueError(f"{name}: pattern {pattern.code} ({pattern.name}) takes none; pass None")
    for name, tensor in outputs.items():
        if tensor is None and name in pattern.outputs:
            raise ValueError(f"{name}=None: pattern {pattern.code} ({pattern.name}) writes it; pass a tensor")
        if tensor is not None and name not in pattern.outputs:
            raise ValueError(f"{name}: pattern {pattern.code} ({pattern.name}) does not write it; pass None")


def _check_input(tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError("allreduce_in: rank 0, shape []; pass [hidden] or [..., hidden]")
    if tensor.shape[-1] == 0:
        raise ValueError(f"allreduce_in: shape {list(tensor.shape)} has no elements in a row; hidden must be positive")
    if tensor.dtype not in (*domain.DTYPES, torch.float64):
        raise ValueError(f"allreduce_in: dtype {tensor.dtype}; use bfloat16, float16, float32, or float64 (unfused)")


def _check_like(reference: Tensor, name: str, tensor: Tensor) -> None:
    hidden = reference.shape[-1]
    if tensor.dtype != reference.dtype:
        raise ValueError(f"{name}: dtype {tensor.dtype}; must be that of allreduce_in, {reference.dtype}")
    if tensor.device != reference.device:
        raise ValueError(f"{name}: on {tensor.device}; must be on the device of allreduce_in, {reference.device}")
    if tensor.dim() == 0 or tensor.shape[-1] != hidden or tensor.numel() != reference.numel():
        raise ValueError(
            f"{name}: shape {list(tensor.shape)}; must hold the {reference.numel() // hidden} rows of {hidden} of "
            f"allreduce_in, {list(reference.shape)}"
        )


def _check_gamma(reference: Tensor, gamma: Tensor) -> None:
    hidden = reference.shape[-1]
    if gamma.dtype != reference.dtype:
        raise ValueError(f"rms_gamma: dtype {gamma.dtype}; must be that of allreduce_in, {reference.dtype}")
    if gamma.device != reference.device:
        raise ValueError(f"rms_gamma: on {gamma.device}; must be on the device of allreduce_in, {reference.device}")
    if gamma.shape != (hidden,):
        raise ValueError(
            f"rms_gamma: shape {list(gamma.shape)}; must be [{hidden}], the last dimension of allreduce_in"
        )


def _view_output(name: str, tensor: Tensor, hidden: int) -> Tensor:
    try:
        flat = tensor.view(-1, hidden) if tensor.numel() else tensor.new_empty((0, hidden))
    except RuntimeError:
        flat = None
    if flat is None or not flat.is_contiguous():
        raise ValueError(
            f"{name}: shape {list(tensor.shape)} with strides {list(tensor.stride())} is no contiguous view as "
            f"[tokens, {hidden}]; pass a contiguous tensor"
        )
    return flat


def _flatten_input(tensor: Tensor, hidden: int) -> Tensor:
    if not tensor.numel():
        return tensor.new_empty((0, hidden))
    flat = tensor.reshape(-1, hidden).contiguous()
    return flat if _aligned(flat) else flat.clone()


def _aligned(tensor: Tensor) -> bool:
    return tensor.data_ptr() % domain.ACCESS_BYTES == 0


def _moved(tensor: Tensor | None, flat: Tensor | None) -> bool:
    return tensor is not None and flat is not None and tensor.data_ptr() != flat.data_ptr()
