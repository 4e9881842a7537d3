"""For the tests of models that use the pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fusion_passes.config import FusionConfig
from fusion_passes.inspection import Inspection, inspect_fusion
from fusion_passes.reporting import describe, summary


def assert_fused(
    model: Callable[..., Any],
    *inputs: Any,
    count: int | None = None,
    rules: Mapping[str, int] | Sequence[str] | None = None,
    world_size: int = 8,
    device: torch.device | str | None = None,
    config: FusionConfig | None = None,
    **kwargs: Any,
) -> Inspection:
    """Fail unless the pass fuses a model as expected; needs no GPU and no other process, as inspect_fusion.

    Without count and rules, at least one all-reduce must fuse, and none may be missed where a fusion was to be
    expected.

    Args:
        model: a module or function, as given to torch.compile.
        *inputs: its positional inputs.
        count: how many all-reduces fuse.
        rules: names of the rules that serve those that fuse, such as {"norm": 1, "add_norm": 4}; or in the order of
            the all-reduces, such as ["norm", "add_norm"].
        world_size: as in inspect_fusion.
        device: as in inspect_fusion.
        config: of the pass.
        **kwargs: the model's other inputs.

    Raises:
        AssertionError: with a verdict for every all-reduce.
    """
    found = inspect_fusion(model, *inputs, world_size=world_size, device=device, config=config, **kwargs)
    fused = [site.rule for site in found.sites if site.rule]
    if count is None and rules is None and (not fused or any(site.missed for site in found.sites)):
        _fail("all that can be", found)
    if count is not None and len(fused) != count:
        _fail(f"{count}", found)
    if isinstance(rules, Mapping) and Counter(rules) != Counter(fused):
        _fail(f"{dict(rules)}", found)
    if isinstance(rules, Sequence) and list(rules) != fused:
        _fail(f"{list(rules)}", found)
    return found


def _fail(expected: str, found: Inspection) -> None:
    raise AssertionError(f"expected {expected} to fuse, but {summary(found.sites)}\n{describe(found.sites)}")
