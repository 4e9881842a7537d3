"""The same work without the fused kernel: the process group's own all-reduce, then add and norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from custom_ops import reference, reference_quant
from custom_ops.arguments import Arguments


def gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Every rank's contribution, in rank order."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return parts


def all_reduce_into(out: Tensor, x: Tensor, group: ProcessGroup) -> None:
    """out = sum of x over the group, by its own all-reduce; x is left as it is unless out is x."""
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    dist.all_reduce(out, group=group)


def add_norm(args: Arguments, reduce: Callable[[Tensor, Tensor], None]) -> None:
    """All-reduce, residual add and norm of checked CUDA arguments, with the kernel's roundings.

    Every row is normed by itself, in an order that depends on the hidden size only.

    Args:
        args: checked.
        reduce: writes to its first argument the sum over ranks of its second. That of a process group may round at
            other places between more than two ranks.
    """
    reduced = _buffer(args)
    reduce(reduced, args.allreduce_in)
    if not args.norms or reduced.dtype == torch.float64:
        finish(args, reduced)
        return
    from custom_ops import norm_kernel

    wanted, norm = args.quantised, args.norm_out
    own = wanted if wanted is not None and wanted.quantisation.format.name in norm_kernel.FORMATS else None
    if norm is None and own is None:
        norm = torch.empty_like(args.residual_out)
    total = args.residual_out
    norm_kernel.add_rms_norm(reduced, args.residual, args.gamma, args.eps, args.weight_bias, total, norm, own)
    if norm is not None and own is None:
        _quantise(args, norm)


def finish(args: Arguments, reduced: Tensor) -> None:
    """Residual add, norm and quantisation of a sum over ranks, by the reference, into the outputs."""
    total = reference.add_residual(reduced, args.residual)
    if args.norms:
        norm = reference.rms_norm(total, args.gamma, args.eps, args.weight_bias)
        if args.norm_out is not None:
            args.norm_out.copy_(norm)
        _quantise(args, norm)
    args.residual_out.copy_(total)


def _quantise(args: Arguments, norm: Tensor) -> None:
    """Quantise a norm into the outputs."""
    if (wanted := args.quantised) is None:
        return
    values, scales = reference_quant.quantise(norm, wanted.quantisation, wanted.scale)
    wanted.out.copy_(values)
    if scales is not None and wanted.scale_out is not None:
        reference_quant.write_scales(scales, wanted.scale_out, wanted.quantisation)


def _buffer(args: Arguments) -> Tensor:
    """An output that can hold the sum over ranks until the end: it must not be the residual, which is read later.

    The contribution itself, where it is an output, costs no copy.
    """
    outputs = [output for output in (args.norm_out, args.residual_out) if output is not None]
    outputs.sort(key=lambda output: output.data_ptr() != args.allreduce_in.data_ptr())
    for output in outputs:
        if args.residual is None or output.data_ptr() != args.residual.data_ptr():
            return output
    return torch.empty_like(args.residual_out)
