"""Programmatic dependent launch (PDL): when the next kernel may start.

Two flags reach the kernel. `launch_with_pdl` lets *this* kernel start while its predecessor drains; it waits before
its first read. `trigger_completion_at_end` says when *its successor* may start: late (True), after the last store, or
early (False), at once. Both are safe only with a kernel that waits before it reads gamma, residual and scale, which
FlashInfer's does from 0.7.2 on. The truth table is in docs/pdl.md.
"""

from __future__ import annotations

from torch.torch_version import TorchVersion

from custom_ops.limits import Strategy

PDL_ADVANCE_LAUNCH_TOKENS = 16
"""Default threshold of the early trigger, in tokens.

Found for DeepSeek-V3's router GEMV. A successor that starts early holds streaming multiprocessors while it waits; with
few tokens the all-reduce does not need them, with many it does. On H200 an early trigger gains a little up to 16
tokens and costs a lot above.
"""

FIRST_SAFE_FLASHINFER = "0.7.2"
"""First FlashInfer whose kernel waits for its predecessor before it reads gamma, residual and quantisation scale."""


def is_safe(flashinfer_version: str | None) -> bool:
    """Whether the installed FlashInfer (None: not installed) waits before its first read."""
    return flashinfer_version is not None and TorchVersion(flashinfer_version) >= FIRST_SAFE_FLASHINFER


def completion_at_end(
    num_tokens: int,
    strategy: Strategy,
    threshold: int = PDL_ADVANCE_LAUNCH_TOKENS,
    flashinfer_version: str | None = None,
) -> bool:
    """The `trigger_completion_at_end` flag: False (early) only where that is allowed and can help.

    Args:
        num_tokens: rows of the flattened [tokens, hidden] input.
        strategy: the resolved strategy. Only the one-shot kernel looks at the flag; two-shot always triggers late.
        threshold: the largest number of tokens that triggers early; 0 never does.
        flashinfer_version: installed version; None or one below 0.7.2 triggers late.
    """
    early = strategy is Strategy.ONE_SHOT and num_tokens <= threshold and is_safe(flashinfer_version)
    return not early


def launch_with_pdl(requested: bool, flashinfer_version: str | None) -> bool:
    """The `launch_with_pdl` flag: as requested, except below 0.7.2, whose kernel reads before it waits."""
    return requested and is_safe(flashinfer_version)
