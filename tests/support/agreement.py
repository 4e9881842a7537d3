"""A model with the pass against the same model in eager mode, between real ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import custom_ops
from tests.support.capture import Captured, capture


def with_eager(logits: Callable[[Tensor], Tensor], ids: Tensor, fullgraph: bool = True) -> tuple[Captured, Tensor]:
    """(what was captured, largest difference to eager's logits for each token, as a share of their deviation).

    Every site that fused has run once, and all ranks have the same logits.
    """
    captured = capture(logits, ids, fullgraph=fullgraph)
    assert sum(custom_ops.launches().values()) == sum(site.fused for site in captured.sites)
    with torch.no_grad():
        eager = logits(ids)
    everyone = [torch.empty_like(eager) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, captured.result.contiguous())
    assert all(torch.equal(everyone[0], other) for other in everyone), "ranks agree bit for bit"
    return captured, (captured.result - eager).float().abs().amax(-1) / eager.float().std()
