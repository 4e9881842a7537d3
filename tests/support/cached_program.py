"""What torchrun runs on two ranks, each with an Inductor cache of its own: one compiled model, on GPUs where there are.

Rank 0 prints, of each rank, hits and misses of the cache, whether values are right, how the op ran, and its workspaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HIDDEN = 1024
RANK = int(os.environ.get("RANK", 0))


def main(cache: str) -> None:
    # Read when torch is imported.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, str(RANK))
    import torch
    import torch.distributed as dist
    from torch._dynamo.utils import counters

    import custom_ops
    import fusion_passes
    from tests.support.programs import NORMS, AddNorm, tensors

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.device_count() > 1:
        device = torch.device("cuda", RANK)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = AddNorm(NORMS["meta"](HIDDEN)).to(device)
    x, residual = (tensor.to(device) for tensor in tensors(2, 8, HIDDEN))
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, options=fusion_passes.options())
        _, total = compiled(x * (RANK + 1), residual)
    mine = {
        "counts": [counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")],
        "right": bool((total - (x * 3 + residual)).abs().max() < 0.1),
        "ran": {launch.strategy.value: count for launch, count in custom_ops.launches().items()},
        "workspaces": len(list(custom_ops.workspaces())),
    }
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, mine)
    if RANK == 0:
        print(json.dumps(everyone))
    custom_ops.destroy()
    dist.destroy_process_group()


def both(cache: Path) -> list[dict[str, Any]]:
    """Run it with the caches in a folder, and return what each rank found."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__, cache],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert all(rank["right"] and sum(rank["ran"].values()) == 1 for rank in found), found
    return found


if __name__ == "__main__":
    main(sys.argv[1])
