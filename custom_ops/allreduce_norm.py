"""`call_trtllm_fused_allreduce_norm`: all-reduce, residual add and RMSNorm of one tensor as one call."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from custom_ops import (
    arguments,
    backends,
    counters,
    dispatch,
    flashinfer_adapter,
    flashinfer_direct,
    groups,
    pdl,
    rank_check,
    ready,
    reference,
    unfused,
)
from custom_ops.arguments import Arguments
from custom_ops.counters import Count, Launch
from custom_ops.flashinfer_adapter import KernelCall
from custom_ops.flashinfer_direct import Direct
from custom_ops.group_state import Workspace
from custom_ops.limits import Strategy
from custom_ops.ready import Ready, Tensors

NAME = "call_trtllm_fused_allreduce_norm"

torch.library.define(
    f"custom_ops::{NAME}",
    "(Tensor allreduce_in, Tensor? residual, Tensor? rms_gamma, float rms_eps, int world_size, bool launch_with_pdl, "
    "bool fp32_acc, int max_token_num, int pattern_code, Tensor(a!)? norm_out=None, Tensor(b!)? quant_out=None, "
    "Tensor(c!)? scale_out=None, Tensor? scale_factor=None, *, Tensor(d!)? residual_out=None, str? group_name=None, "
    "float weight_bias=0.0, Tensor? rms_eps_tensor=None, int? pdl_advance_launch_tokens=None, int? layout_code=None, "
    "int? block_quant_group_size=None, str? backend=None, bool check_ranks=False) -> ()",
    tags=(torch.Tag.needs_exact_strides,),
)


def call_trtllm_fused_allreduce_norm(
    allreduce_in: Tensor,
    residual: Tensor | None,
    rms_gamma: Tensor | None,
    rms_eps: float,
    world_size: int,
    launch_with_pdl: bool,
    fp32_acc: bool,
    max_token_num: int,
    pattern_code: int,
    norm_out: Tensor | None = None,
    quant_out: Tensor | None = None,
    scale_out: Tensor | None = None,
    scale_factor: Tensor | None = None,
    *,
    residual_out: Tensor | None = None,
    group_name: str | None = None,
    weight_bias: float = 0.0,
    rms_eps_tensor: Tensor | None = None,
    pdl_advance_launch_tokens: int | None = None,
    layout_code: int | None = None,
    block_quant_group_size: int | None = None,
    backend: str | None = None,
    check_ranks: bool = False,
) -> None:
    """All-reduce, residual add, RMSNorm and quantisation in one kernel launch; the same as, in eager PyTorch::

        residual_out.copy_(all_reduce(allreduce_in) + residual)
        norm_out.copy_(residual_out.float() * rsqrt(residual_out.float().square().mean(-1, True) + rms_eps)
                       * (weight_bias + rms_gamma.float()))
        quant_out, scale_out = custom_ops.scaled_fp8_quant(norm_out, scale_factor)  # or another format, see below

    Any rank from 1 up: leading dimensions are flattened to [tokens, hidden]. CUDA tensors run FlashInfer's kernel, or
    the process group's all-reduce with the same roundings where the kernel cannot serve or would not pay; CPU tensors
    run the reference. Only the output tensors are written; an output may be `allreduce_in` or `residual` itself.

    Args:
        allreduce_in: this rank's contribution, [..., hidden], bfloat16, float16 or float32; float64 runs unfused.
        residual: added to the sum, same dtype and rows; None adds nothing, `residual_out` is then the sum.
        rms_gamma: weight of the norm, [hidden], same dtype; None is a weight of one.
        rms_eps: epsilon of the norm.
        world_size: ranks of the group; checked.
        launch_with_pdl: programmatic dependent launch.
        fp32_acc: sum over ranks in float32 and round once.
        max_token_num: more tokens than this run unfused; 0 leaves it to the limits of the device.
        pattern_code: FlashInfer's code: 0 (all-reduce, add), 1 (and RMSNorm), or RMSNorm and a format, without and with
            norm_out: static FP8 2, 4; NVFP4 3, 5; per-group FP8 8, 9; per-token FP8 10, 11; MXFP8 13, 14.
        norm_out: [..., hidden], same dtype.
        quant_out: float8_e4m3fn [..., hidden]; NVFP4 uint8 [..., hidden / 2].
        scale_out: what the quantising ops return as scales: float32, one a token; int32 [tokens, packs] for groups;
            for MXFP8 and NVFP4 in the place that layout_code says, whose padding rows are not written.
        scale_factor: one float32 on the device: static FP8 divides by it, NVFP4 multiplies by it.
        residual_out: [..., hidden], same dtype, written by all patterns.
        group_name: ProcessGroup.group_name; None for the default group.
        weight_bias: added to gamma in float32; 1.0 for weights stored less one.
        rms_eps_tensor: epsilon as a 0-d CPU tensor; overrides rms_eps.
        pdl_advance_launch_tokens: largest number of tokens that triggers the successor early; None for
            PDL_ADVANCE_LAUNCH_TOKENS, 0 for never.
        layout_code: 0 (swizzled 128x4, the default) or 2 (linear), for MXFP8 and NVFP4.
        block_quant_group_size: elements that share a scale, for per-group FP8.
        backend: FlashInfer's: "trtllm", the default, for ranks on one host; "mnnvl" for all in one NVLink domain.
        check_ranks: compare shapes, types and flags of all ranks first; slow, for finding a mismatch.

    Raises:
        ValueError: an argument is not as above; nothing was written.
        RuntimeError: a workspace would have to be made while a CUDA graph is captured; or ranks differ, then on all
            of them.
    """
    group = groups.resolve(group_name, world_size)
    tensors = Tensors(allreduce_in, residual, rms_gamma, scale_factor, norm_out, quant_out, scale_out, residual_out)
    asked = (
        pattern_code, rms_eps, launch_with_pdl, fp32_acc, max_token_num, weight_bias, pdl_advance_launch_tokens,
        layout_code, block_quant_group_size, backend, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    if check_ranks:
        rank_check.require_equal(group, NAME, tensors, asked)
    kind = None
    if rms_eps_tensor is None and allreduce_in.is_cuda:
        kind = ready.key(asked, tensors)
        found = ready.find(group, kind, backend)
        if found is not None and found.launch(tensors, rms_eps):
            return
    args = arguments.check(
        pattern_code,
        allreduce_in,
        inputs={"residual": residual, "rms_gamma": rms_gamma, "scale_factor": scale_factor},
        outputs={"norm_out": norm_out, "residual_out": residual_out, "quant_out": quant_out, "scale_out": scale_out},
        eps=rms_eps if rms_eps_tensor is None else arguments.host_scalar("rms_eps_tensor", rms_eps_tensor),
        weight_bias=weight_bias,
        layout_code=layout_code,
        block_quant_group_size=block_quant_group_size,
    )
    threshold = pdl.PDL_ADVANCE_LAUNCH_TOKENS if pdl_advance_launch_tokens is None else pdl_advance_launch_tokens
    flags = dispatch.Flags(launch_with_pdl, fp32_acc, threshold, max_token_num, backends.find(backend))
    if args.tokens:
        direct = _run(args, group, flags)
        if direct is not None and kind is not None and args.is_as_given:
            ready.keep(group, kind, Ready(*direct, tensors))
        for temporary, output in args.copy_back:
            output.copy_(temporary)


def _run(args: Arguments, group: ProcessGroup, flags: dispatch.Flags) -> tuple[Direct, Count] | None:
    """Run a call; how to run the next one like it, where that is known."""
    device = args.allreduce_in.device
    if device.type == "cpu":
        counters.record(Launch(NAME, "cpu", args.pattern.code, Strategy.ONE_SHOT, copied_input=args.copied_input))
        reduced = reference.sum_ranks(unfused.gather(args.allreduce_in, group), flags.fp32_acc)
        unfused.finish(args, reduced)
        return None
    message = dispatch.Message(args.tokens, args.hidden, args.allreduce_in.dtype, device)
    quantisation = None if args.quantised is None else args.quantised.quantisation
    in_steps = args.norms and torch.are_deterministic_algorithms_enabled()
    if in_steps:
        # The kernel splits a row over blocks by the number of rows, so its norm depends on that in last bits.
        flags, quantisation = replace(flags, one_shot_only=True), None
    code = 0 if in_steps else args.pattern.code
    launch, found = dispatch.plan(NAME, code, message, group, flags, args.copied_input, quantisation)
    counters.record(launch)
    if found is None:
        unfused.add_norm(args, lambda out, x: unfused.all_reduce_into(out, x, group))
        return None
    if in_steps:
        unfused.add_norm(args, lambda out, x: _sum(out, x, launch, found, flags.fp32_acc))
        return None
    call = _launch(args, launch, found, flags.fp32_acc)
    if not args.norms or flags.backend.chooses_strategy:
        return None
    direct = flashinfer_direct.direct(found.handle, call, args.residual is not None, args.gamma is not None)
    return None if direct is None else (direct, counters.count_of(launch))


def _sum(out: Tensor, x: Tensor, launch: Launch, found: Workspace, fp32_acc: bool) -> None:
    """out = sum of x over the ranks, by the kernel."""
    call = KernelCall(
        0,
        x,
        one_shot=True,
        launch_with_pdl=launch.launch_with_pdl,
        completion_at_end=True,
        fp32_acc=fp32_acc and x.dtype != torch.float32,
        allreduce_out=out,
    )
    flashinfer_adapter.launch(found.handle, call)


def _launch(args: Arguments, launch: Launch, found: Workspace, fp32_acc: bool) -> KernelCall:
    shape, dtype = (args.tokens, args.hidden), args.allreduce_in.dtype
    call = KernelCall(
        args.pattern.code,
        args.allreduce_in,
        one_shot=launch.one_shot,
        launch_with_pdl=launch.launch_with_pdl,
        completion_at_end=launch.completion_at_end,
        fp32_acc=fp32_acc and dtype != torch.float32,
    )
    if not args.norms:
        # The plain pattern adds no residual; with one, the sum goes through a buffer of its own.
        reduced = args.residual_out if args.residual is None else torch.empty_like(args.residual_out)
        flashinfer_adapter.launch(found.handle, replace(call, allreduce_out=reduced))
        if args.residual is not None:
            torch.add(reduced, args.residual, out=args.residual_out)
        return call
    call = replace(
        call,
        residual=found.zero_tensor(shape, dtype) if args.residual is None else args.residual,
        residual_out=args.residual_out,
        norm_out=args.norm_out,
        gamma=found.zero_tensor((args.hidden,), dtype) if args.gamma is None else args.gamma,
        eps=args.eps,
        weight_bias=1.0 if args.gamma is None else args.weight_bias,
        quantised=args.quantised,
    )
    flashinfer_adapter.launch(found.handle, call)
    return call


torch.library.impl(f"custom_ops::{NAME}", ("cpu", "cuda"), call_trtllm_fused_allreduce_norm)


@torch.library.register_fake(f"custom_ops::{NAME}")
def _fake(*args: object, **kwargs: object) -> None:
    return None
