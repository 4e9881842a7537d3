"""The command line: what it prints, its JSON, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

from fusion_passes import NotFused, SiteReport, ranks
from fusion_passes.cli import demo, demo_model, demo_view
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
    for command in ("demo", "bench", "tune", "explain"):
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
    assert "op, step: not measured, needs at least 2 CUDA devices, found 0" in result.stderr
    assert found["not_measured"] == "needs at least 2 CUDA devices, found 0"
    small, large = found["pass_cost"]
    assert (small["layers"], small["sites"], large["sites"]) == (2, 4, 8)
    assert 0 < small["in_pass"] < small["in_inductor"] < small["whole"]
    # A bound so wide that only another order of growth can break it on a busy machine.
    assert large["in_pass"] / large["sites"] < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--part", "all"], "--part ['all']: must be among pass, op, step, pdl"),
        (["bench", "--model", "gpt-9"], "--model ['gpt-9']: must be among llama-8b, qwen3-30b-a3b, gemma3-12b"),
        (["tune", "--dtype", "int8"], "--dtype ['int8']: must be among bfloat16, float16, float32"),
    ],
)
def test_what_is_unknown_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs to tune for")
def test_tune_says_why_it_cannot(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tune", str(tmp_path / "profile.json")])
    assert result.exit_code == 1
    assert "nothing to tune: needs at least 2 CUDA devices, found 0" in result.stderr
    assert not list(tmp_path.iterdir())


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


UNDER_TORCHRUN = """
import json
from fusion_passes import ranks
from tests.fusion_passes.test_cli import rank_and_sum

found = ranks.run(rank_and_sum, 2)
if found is not None:
    print(json.dumps(found))
"""


def test_run_uses_the_ranks_of_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNDER_TORCHRUN)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[[0, 6.0], [1, 6.0]]], "the first rank alone"
    assert ranks.run(rank_and_sum, 2, world_size=2) == [(0, 6.0), (1, 6.0)], "new processes without it"
