"""The command line: what it prints, its JSON, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from fusion_passes import NotFused, SiteReport, ranks
from fusion_passes.bench.decode_step import Step
from fusion_passes.bench.op_sweep import Point
from fusion_passes.bench.pass_cost import Cost
from fusion_passes.bench.timing import Timing
from fusion_passes.cli import bench, demo, demo_model, demo_view
from fusion_passes.cli.app import app
from fusion_passes.cli.demo import Outcome


def site(fused: bool = True) -> SiteReport:
    reason = None if fused else NotFused("no_norm", "the sum goes nowhere")
    return SiteReport("all_reduce", fused, "add_norm" if fused else None, reason, "layers.0.mlp", "model.py:1", "graph")


def outcome(**changes: object) -> Outcome:
    good: dict[str, object] = {
        "device": "cpu", "sites": [site()], "calls": {}, "before": "b", "after": "a", "text": "same", "text_stock": "same",
        "tokens": 3, "max_abs_logit_diff": 0.5, "error": 0.1, "error_stock": 0.1, "error_eager": 0.1, "tie_gap": 0.0,
    }  # fmt: skip
    return Outcome(**{**good, **changes})  # type: ignore[arg-type]


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "bench", "explain"):
        assert command in result.output


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"text": "other", "tie_gap": 0.9}, None),
        ({"sites": [site(), site(fused=False)]}, "layers.0.mlp: no_norm: the sum goes nowhere"),
        ({"sites": []}, "no all-reduce"),
        ({"text": "other", "tie_gap": 1.1}, "the texts part at a token that leads by 1.1"),
        ({"error": 0.2}, "logits are off by 0.2 from float32, in eager mode by 0.1"),
    ],
    ids=str,
)
def test_demo_fails_where_a_promise_is_broken(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], problem: str | None
) -> None:
    found = outcome(**changes)
    monkeypatch.setattr(ranks, "spawn", lambda *args, **kwargs: [found])
    monkeypatch.setattr(demo_model, "missing", lambda: None)
    result = CliRunner().invoke(app, ["demo", "--json"])
    summary = json.loads(result.stdout)
    assert result.exit_code == (0 if problem is None else 1)
    assert {"all_reduces", "fused", "max_abs_logit_diff", "text_equal", "device", "tokens"} <= set(summary)
    assert summary["text_equal"] is ("text" not in changes)
    assert summary["problems"] == ([] if problem is None else summary["problems"])
    assert problem is None or problem in summary["problems"][0]


def test_demo_shows_verdicts_graphs_texts_and_numbers() -> None:
    console = Console(record=True, width=120)
    demo_view.show(console, "a question", outcome(sites=[site(), site(fused=False)], text="an answer"))
    text = console.export_text()
    for wanted in (
        "layers.0.mlp",
        "add_norm",
        "no_norm: the sum goes nowhere",
        "a question",
        "an answer",
        "1 of 2",
        "problem:",
    ):
        assert wanted in text


def test_demo_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "missing", lambda: "the demo needs the package gguf: pip install it")
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "needs the package gguf" in result.stderr


def test_tie_gap() -> None:
    ids, stock = torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 0]])
    logits = torch.zeros(1, 3, 4)
    logits[0, 1] = torch.tensor([5.0, 0.0, 0.0, 4.5])
    assert demo._tie_gap(ids, stock, logits) == 0.5
    assert demo._tie_gap(stock, stock, logits) == 0.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs to measure")
def test_bench_measures_the_pass_and_says_what_it_cannot() -> None:
    result = CliRunner().invoke(app, ["bench", "--layers", "2", "--layers", "4", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert "need 2 CUDA devices, found 0" in result.stderr
    assert "need 2 CUDA devices" in found["not_measured"]
    small, large = found["pass_cost"]
    assert (small["layers"], small["sites"], large["sites"]) == (2, 4, 8)
    assert 0 < small["in_pass"] < small["in_inductor"] < small["whole"]
    # A bound so wide that only another order of growth can break it on a busy machine.
    assert large["in_pass"] / large["sites"] < 0.01
    console = Console(record=True, width=160)
    console.print(bench._costs([Cost(2, 90, 4, 0.002, 1.0, 2.0)]))
    assert "0.50" in console.export_text()


def test_plot_is_written(tmp_path: Path) -> None:
    from fusion_passes.bench import plot

    def timing(median: float) -> Timing:
        return Timing(median, median, median)

    points = [
        Point(1, 64, timing(1), timing(2), timing(1.5), "one_shot", 2),
        Point(4, 64, timing(4), timing(4), timing(4), "not rewritten", 2),
    ]
    plot.op_sweep(points, "title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=120)
    quantised = [Point(1, 64, timing(1), timing(2.75), timing(2), "one_shot", 2, "fp8_token")]
    steps = [
        Step(16, "fp8", timing(3.9), timing(3.5), timing(3), 5, {"add_norm_fp8": 5}, 0.1),
        Step(16, "bf16", timing(3.6), None, timing(3), 5, {"add_norm": 5}, 0.1),
    ]
    bench._show(console, bench.Measured("GPU", "2", "3", 2, points, quantised, steps))
    text = console.export_text()
    for shown in ("1.50", "fp8_token", "2.75", "1.30", "1.20"):
        assert shown in text


def rank_and_sum(offset: int) -> tuple[int, float]:
    total = torch.ones(1) + offset
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 broke")


def test_spawn_collects_in_rank_order() -> None:
    assert ranks.spawn(rank_and_sum, 2, world_size=2, backend="gloo") == [(0, 6.0), (1, 6.0)]


def test_spawn_reports_what_a_rank_raised() -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="rank 1 broke"):
        ranks.spawn(fails_on_rank_1, world_size=2, backend="gloo")
