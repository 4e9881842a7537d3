"""The demo: one real model on two ranks, with and without the pass, and what came out."""

from __future__ import annotations

import copy
import json as jsonlib
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn

import custom_ops
from fusion_passes import compat, ranks
from fusion_passes.cli import demo_model, demo_view
from fusion_passes.recorder import RecordedGraph, Recorder
from fusion_passes.reporting import SiteReport

WORLD_SIZE = 2
ERROR_RATIO = 1.5
"""How much larger than that of eager mode the error of the fused logits against float32 may be (root mean square).

Through 30 layers of bfloat16 the errors of equally exact runs scatter by some ten percent; a wrong one stands far out.
"""

STATUS = Console(stderr=True)


@dataclass(frozen=True)
class Outcome:
    """What one run of the demo found.

    Attributes:
        device: where it ran.
        sites: a verdict for every all-reduce.
        calls: run-time counts of the fused op: how it ran, how often.
        before: one block of the graph as the pass found it.
        after: the same block as the pass left it.
        text: generated with the pass.
        text_stock: generated without.
        tokens: how many tokens were generated.
        max_abs_logit_diff: largest difference of a logit between the two, on the same tokens.
        error: error of the logits with the pass against the float32 model, root mean square.
        error_stock: the same without; Inductor's own kernels round less often than eager mode does.
        error_eager: the same in eager mode, which rounds where the fused op does.
        tie_gap: how far apart the two tokens were where the texts part, in stock logits; 0 where they are equal.
    """

    device: str
    sites: list[SiteReport]
    calls: dict[str, int]
    before: str
    after: str
    text: str
    text_stock: str
    tokens: int
    max_abs_logit_diff: float
    error: float
    error_stock: float
    error_eager: float
    tie_gap: float

    @property
    def problems(self) -> list[str]:
        """What breaks the promise of the pass; empty if nothing does."""
        found = [f"{site.module or site.node}: {site.reason}" for site in self.sites if not site.fused]
        if not self.sites:
            found.append("the compiled graph has no all-reduce")
        if self.error > ERROR_RATIO * self.error_eager:
            found.append(f"logits are off by {self.error:.3g} from float32, in eager mode by {self.error_eager:.3g}")
        if self.tie_gap > 2 * self.max_abs_logit_diff:
            found.append(f"the texts part at a token that leads by {self.tie_gap:.3g}")
        return found

    def summary(self) -> dict[str, Any]:
        """The machine-readable result."""
        return {
            "all_reduces": len(self.sites),
            "fused": sum(site.fused for site in self.sites),
            "max_abs_logit_diff": self.max_abs_logit_diff,
            "text_equal": self.text == self.text_stock,
            "device": self.device,
            "tokens": self.tokens,
            "error_vs_float32": self.error,
            "error_vs_float32_stock": self.error_stock,
            "error_vs_float32_eager": self.error_eager,
            "text": self.text,
            "text_stock": self.text_stock,
            "calls": self.calls,
            "problems": self.problems,
            "sites": [asdict(site) for site in self.sites],
        }


def run(prompt: str, tokens: int, json: bool) -> int:
    """Run the demo and show it; the exit status is 0 if every site fused and the numbers hold."""
    if problem := demo_model.missing():
        STATUS.print(problem, style="red", markup=False)
        return 2
    outcome = ranks.spawn(generate_both, prompt, tokens, world_size=WORLD_SIZE)[0]
    if json:
        print(jsonlib.dumps(outcome.summary()))
    else:
        demo_view.show(Console(), prompt, outcome)
    return 1 if outcome.problems else 0


def generate_both(prompt: str, tokens: int) -> Outcome:
    """On one rank: load, compile twice, generate twice, compare. Collective over the default group."""
    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", dist.get_rank()) if cuda else torch.device("cpu")
    _say("reading SmolLM2-135M-Instruct")
    loaded = demo_model.load(progress=dist.get_rank() == 0)
    ids, start = demo_model.encode(loaded.tokenizer, prompt, tokens)
    exact = copy.deepcopy(loaded.model)
    model = demo_model.shard(loaded.model, device, WORLD_SIZE)
    recorder = Recorder()
    with torch.inference_mode(), compat.without_caches():
        _say("compiling and generating with the pass")
        fused = _Side(model, device, {"post_grad_custom_post_pass": recorder})
        out = fused.generate(ids, start, loaded.tokenizer.eos_token_id)
        calls = {str(launch): count for launch, count in custom_ops.launches().items()}
        _say("compiling and generating without it")
        stock = _Side(model, device, {})
        out_stock = stock.generate(ids, start, loaded.tokenizer.eos_token_id)
        _say("comparing")
        logits, logits_stock = fused.logits(out_stock), stock.logits(out_stock)
        logits_eager = model(input_ids=out_stock.to(device), use_cache=False).logits.float().cpu()
        reference = exact(input_ids=out_stock, use_cache=False).logits

    before, after = _one_block(recorder.graphs)

    def decode(tokens: Tensor) -> str:
        return str(loaded.tokenizer.decode(tokens[0, start:], skip_special_tokens=True))

    return Outcome(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        sites=recorder.sites,
        calls=calls,
        before=before,
        after=after,
        text=decode(out),
        text_stock=decode(out_stock),
        tokens=int((out[0, start:] != loaded.tokenizer.eos_token_id).sum()),
        max_abs_logit_diff=(logits - logits_stock).abs().max().item(),
        error=_rms(logits - reference),
        error_stock=_rms(logits_stock - reference),
        error_eager=_rms(logits_eager - reference),
        tie_gap=_tie_gap(out, out_stock, logits_stock),
    )


class _Side:
    """The model compiled in one way."""

    def __init__(self, model: nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        self.device = device

        def forward(ids: Tensor) -> Tensor:
            return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

        self._compiled = torch.compile(forward, fullgraph=True, dynamic=False, options=options or None)

    def logits(self, ids: Tensor) -> Tensor:
        """Float32 logits of all positions, on the CPU."""
        return self._compiled(ids.to(self.device)).float().cpu()

    def generate(self, ids: Tensor, start: int, end_token: int) -> Tensor:
        """The ids with the padding from start on replaced, greedily, up to the end token.

        Attention is causal, so the padding behind a position has no effect on it.
        """
        ids = ids.clone()
        for position in range(start, ids.shape[1]):
            ids[0, position] = self.logits(ids)[0, position - 1].argmax()
            if ids[0, position] == end_token:
                break
        return ids


def _rms(difference: Tensor) -> float:
    return difference.square().mean().sqrt().item()


def _tie_gap(ids: Tensor, ids_stock: Tensor, logits_stock: Tensor) -> float:
    different = (ids != ids_stock)[0].nonzero()
    if not len(different):
        return 0.0
    position = int(different[0])
    row = logits_stock[0, position - 1]
    return float(row[ids_stock[0, position]] - row[ids[0, position]])


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        STATUS.print(f"[dim]{text} ...[/dim]")
        sys.stderr.flush()


def _one_block(graphs: list[RecordedGraph]) -> tuple[str, str]:
    """Texts of the second site that fused (the first may lack a residual), before and after."""
    fused = [(graph, site) for graph in graphs for site in graph.sites if site.fused]
    if not fused:
        return "", ""
    graph, site = fused[min(1, len(fused) - 1)]
    return graph.part(site.node)
