"""The ways in: options for one torch.compile, a context or a switch for all of them, and a backend by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from custom_ops import declared
from fusion_passes import compat
from fusion_passes.allreduce_rms_fusion import AllReduceRMSFusionPass
from fusion_passes.config import FusionConfig

HOOK = "post_grad_custom_post_pass"


def options(config: FusionConfig | None = None) -> dict[str, Any]:
    """Inductor options that add the pass to one compilation: `torch.compile(model, options=options())`.

    Passes that are installed now run before it. Merge the result into other options if you have some.
    """
    return {HOOK: compat.as_hook((*_others(), _pass(config)))}


def enable(config: FusionConfig | None = None) -> None:
    """Add the pass to every compilation from now on, after the passes that are installed; replaces an earlier one."""
    _install((*_others(), _pass(config)))


def disable() -> None:
    """Take the pass out again; other passes stay. Does nothing where it is not installed."""
    _install(_others())


@contextmanager
def enabled(config: FusionConfig | None = None) -> Iterator[None]:
    """Add the pass to the compilations that happen inside; afterwards the hook is as it was before.

    A compilation happens at the first call of a compiled function, not where torch.compile is called.
    """
    before = getattr(inductor_config, HOOK)
    enable(config)
    try:
        yield
    finally:
        setattr(inductor_config, HOOK, before)


def fused_allreduce(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Backend of torch.compile: Inductor with the pass, `torch.compile(model, backend="fused_allreduce")`.

    Args:
        gm: graph from Dynamo.
        example_inputs: its inputs.
        mode: a mode of torch.compile, such as "reduce-overhead".
        options: Inductor options; "fusion_config" may hold a FusionConfig.
    """
    from torch._inductor.compile_fx import compile_fx

    chosen = dict(options or {})
    config = chosen.pop("fusion_config", None)
    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **chosen}
    before = compat.installed(patches.get(HOOK, getattr(inductor_config, HOOK)))
    patches[HOOK] = compat.as_hook((*_without_ours(before), _pass(config)))
    return cast("Callable[..., Any]", compile_fx(gm, example_inputs, config_patches=patches))


def _pass(config: FusionConfig | None) -> AllReduceRMSFusionPass:
    """The pass. A group whose ranks have asked for different ones runs unfused."""
    made = AllReduceRMSFusionPass(config)
    # Of the profile rank 0's serves all, and what a rank does about a missed fusion is its own affair.
    declared.declare("configuration", repr(replace(made.config, tuning_profile=None, strict=False)))
    return made


def _others() -> tuple[compat.Pass, ...]:
    return _without_ours(compat.installed(getattr(inductor_config, HOOK)))


def _without_ours(passes: Sequence[compat.Pass]) -> tuple[compat.Pass, ...]:
    return tuple(one for one in passes if not isinstance(one, AllReduceRMSFusionPass))


def _install(passes: Sequence[compat.Pass]) -> None:
    setattr(inductor_config, HOOK, compat.as_hook(passes))
