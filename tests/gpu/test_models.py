"""A tensor-parallel model on real GPUs: compiled with the pass, against itself compiled without."""

from __future__ import annotations

import torch
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import fusion_passes
from fusion_passes import compat
from tests.support import gpu
from tests.support.models import parallel_llama, token_ids
from tests.support.ranks import Ranks

CALL = "torch.ops.custom_ops.call_trtllm_fused_allreduce_norm.default("


def llama(mode: str | None) -> tuple[float, list[str | None]]:
    mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
    with torch.device("cuda"):
        model = parallel_llama(mesh, layers=3)
    ids = token_ids(2, 16).to(gpu.device())
    with torch.inference_mode(), compat.without_caches():
        stock = torch.compile(model, fullgraph=True)(ids).clone()
        torch._dynamo.reset()
        with fusion_passes.enabled():
            fn = torch.compile(model, fullgraph=True, mode=mode)
            _, code = run_and_get_code(fn, ids)
            for _ in range(3):
                fused = fn(ids).clone()
    (text,) = code
    body = text[: text.index("def get_args")]
    assert body.count(CALL) == 7
    assert "_c10d_functional" not in body
    for unwanted in ("copy_(", "clone"):
        assert unwanted not in body
    difference = (fused - stock).float().abs().max() / stock.float().std()
    return difference.item(), [site.rule for site in fusion_passes.report()]


def test_parallelize_module(gpus: Ranks) -> None:
    for mode in (None, "reduce-overhead"):
        for difference, rules in gpus.run(llama, mode, timeout=240):
            assert rules == ["norm", *["add_norm"] * 6]
            assert difference < 0.1
