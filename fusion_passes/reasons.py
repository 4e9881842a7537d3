"""Why a site did not fuse: a short fixed code and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

CODES: dict[str, str] = {
    "disabled": "the flag fuse_allreduce_rms is off",
    "training_graph": "the graph saves values for a backward pass",
    "collective_form": "not one functional all-reduce with one wait",
    "reduce_op": "the reduction is not a sum",
    "group_not_static": "the process group is no name at compile time",
    "group_unknown": "the process group does not exist on this rank",
    "single_rank": "the process group has one rank",
    "no_norm": "no norm follows the all-reduce in this graph",
    "graph_ends": "the graph ends before a norm: the model is compiled in pieces",
    "norm_not_recognised": "a norm follows, but no RMSNorm in float32 over the last dimension",
    "cast_between": "the sum is cast before it is added or normed",
    "scale_between": "the sum is multiplied before it is added or normed, in a way that cannot be taken before the sum",
    "bias_between": "a bias is added before the residual, and reassociate is off",
    "sum_of_sums": "the sum is added to another tensor, and that to the residual, and reassociate is off",
    "other_between": "something else stands between the sum and a norm, or is used elsewhere too",
    "reshaped": "the sum is scaled or shifted in another shape than that of the all-reduce",
    "norm_shared": "another all-reduce already fuses into the norm that follows",
    "sum_used": "the sum itself is used besides the residual add",
    "written_back": "the sum is written back to an input of the graph",
    "weight_depends": "the weight or epsilon of the norm depends on an all-reduce",
    "dtype": "the type of the activations",
    "residual_mismatch": "residual and sum differ in type, shape or device",
    "weight_mismatch": "the weight of the norm has another type or device than the activations",
    "eps": "epsilon is not a finite number on the CPU",
    "rounding": "exact_rounding asks for the roundings of eager mode, and this form rounds elsewhere",
    "device": "the device cannot run the kernel",
    "flashinfer": "FlashInfer is not there or too old",
    "kernel_domain": "the kernel does not serve this world size or hidden size",
    "above_limit": "the message is above the size up to which fusion pays",
    "max_token_num": "more tokens than max_token_num",
    "overlap_faster": "norm_path is auto, and at this size the all-reduce alone is faster than the fused op",
    "quant_form": "what makes eight or four bits of the norm is no known quantisation",
    "quant_scale": "the scale of the quantisation is none that the kernel takes or makes",
    "quant_scale_depends": "the scale of the quantisation depends on an all-reduce",
    "quant_rounding": "exact_rounding asks for the roundings of eager mode, and this quantisation rounds elsewhere",
    "quant_domain": "the kernel does not quantise this hidden size or type so",
    "quant_device": "the device cannot quantise so",
}
"""Every code, with what it means."""


EXCUSED = {
    "disabled",
    "no_norm",
    "norm_shared",
    "single_rank",
    "above_limit",
    "max_token_num",
    "overlap_faster",
    "quant_device",
}
"""Reasons that leave nothing to be desired: no fusion was to be had, or it would not pay."""


@dataclass(frozen=True)
class NotFused:
    """Why a site stays as it is.

    Attributes:
        code: one of CODES.
        text: the sentence for this site, with its numbers.
    """

    code: str
    text: str

    def __post_init__(self) -> None:
        assert self.code in CODES, self.code

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


def first(checks: Iterable[tuple[str, Callable[..., str | None]]], *seen: Any) -> NotFused | None:
    """The first reason that a table of (code, check) gives against what the checks see; None if there is none."""
    for code, check in checks:
        if text := check(*seen):
            return NotFused(code, text)
    return None
