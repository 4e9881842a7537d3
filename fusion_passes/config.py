"""What the user asks for: one frozen dataclass and one environment variable."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from custom_ops import PDL_ADVANCE_LAUNCH_TOKENS, backends

NORM_PATHS = ("fused", "overlap", "auto")
ENVIRONMENT_FLAG = "FUSION_PASSES_FUSE_ALLREDUCE_RMS"
ENVIRONMENT_PROFILE = "FUSION_PASSES_TUNING_PROFILE"


@dataclass(frozen=True)
class FusionConfig:
    """Options of the pass.

    Attributes:
        fuse_allreduce_rms: the flag that turns the pass on. The environment variable FUSION_PASSES_FUSE_ALLREDUCE_RMS,
            0 or 1, overrides it.
        launch_with_pdl: launch the kernel with programmatic dependent launch.
        fp32_acc: sum over ranks in float32 and round once.
        pdl_advance_launch_tokens: largest number of tokens for which the kernel's successor may start early; 0 never.
        max_token_num: largest number of tokens that runs fused; None leaves it to the limits of the device.
        norm_path: "fused": the norm goes into the op. "overlap": every all-reduce alone becomes FlashInfer's, and what
            follows stays Inductor's kernel. "auto": the faster of the two by the limits of the device
            and the site's size, and overlap where there is no norm to fuse.
        tuning_profile: JSON file of `python -m fusion_passes tune` that decides which sizes run fused; None for the
            table of the device. All ranks ask for it, rank 0's file serves all. The environment variable
            FUSION_PASSES_TUNING_PROFILE names one where this is None.
        fuse_quantisation: take a quantisation of the norm into the op, too (docs/numerics.md).
        reassociate: where a bias, a multiplier or another tensor stands between the sum and the residual, take it
            before the sum: as many roundings, in another order (docs/numerics.md).
        exact_rounding: leave alone the norms that the kernel rounds elsewhere than eager mode does (those that are
            rounded before the weight is applied, as in Hugging Face's Llama) and the quantisations that round
            elsewhere, and reassociate nothing.
        backend: FlashInfer's: "trtllm" for groups on one host, "mnnvl" for groups in one NVLink domain, which needs
            multicast and was not run on hardware here.
        check_ranks: before each call, compare shapes, types and flags of all ranks, and raise on all of them where they
            differ, where the kernel would hang. Slow: a debug switch.
        strict: fail the compilation with the report where a fusion was to be expected and did not come about.
    """

    fuse_allreduce_rms: bool = True
    launch_with_pdl: bool = True
    fp32_acc: bool = True
    pdl_advance_launch_tokens: int = PDL_ADVANCE_LAUNCH_TOKENS
    max_token_num: int | None = None
    norm_path: Literal["fused", "overlap", "auto"] = "fused"
    tuning_profile: str | None = None
    fuse_quantisation: bool = True
    reassociate: bool = True
    exact_rounding: bool = False
    backend: Literal["trtllm", "mnnvl"] = "trtllm"
    check_ranks: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        """Refuse values that no call can honour."""
        if self.norm_path not in NORM_PATHS:
            raise ValueError(f"norm_path={self.norm_path!r}: must be one of {', '.join(map(repr, NORM_PATHS))}")
        backends.find(self.backend)
        if self.pdl_advance_launch_tokens < 0:
            raise ValueError(
                f"pdl_advance_launch_tokens={self.pdl_advance_launch_tokens}: must be 0 (never early) or more"
            )
        if self.max_token_num is not None and self.max_token_num < 1:
            raise ValueError(f"max_token_num={self.max_token_num}: must be 1 or more, or None for the device's limits")

    def resolved(self) -> FusionConfig:
        """This configuration with what the environment says applied.

        Raises:
            ValueError: the environment variable is neither 0 nor 1.
        """
        path = self.tuning_profile or os.environ.get(ENVIRONMENT_PROFILE) or None
        override = os.environ.get(ENVIRONMENT_FLAG, "")
        if not override:
            return replace(self, tuning_profile=path)
        if override not in ("0", "1"):
            raise ValueError(f"{ENVIRONMENT_FLAG}={override!r}: must be 0 or 1")
        return replace(self, fuse_allreduce_rms=override == "1", tuning_profile=path)
