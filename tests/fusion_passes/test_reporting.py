"""Verdicts as data and as a log line, and the table of reasons."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import fusion_passes
from custom_ops import workspace
from fusion_passes import FusionConfig, NotFused, compat, reasons, reporting
from tests.support.capture import capture
from tests.support.fake_flashinfer import CPU, FakeFlashInfer, faked
from tests.support.programs import HIDDEN, NORMS, AddNorm, reduce, tensors
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("fake_group")


def test_report_grows_until_it_is_reset() -> None:
    capture(AddNorm(NORMS["meta"]()), *tensors(2, 8, HIDDEN))
    (site,) = fusion_passes.report()
    assert (site.node, site.fused, site.rule, site.reason) == ("all_reduce", True, "add_norm", None)
    assert re.fullmatch(r".*programs\.py:\d+", site.source)
    assert site.graph.startswith("model_")
    fusion_passes.report().clear()
    assert fusion_passes.report() == [site], "a copy"
    fusion_passes.reset_report()
    assert fusion_passes.report() == []


def test_one_log_line_per_graph(caplog: pytest.LogCaptureFixture) -> None:
    norm = NORMS["meta"]()

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return norm(residual + reduce(x)) + reduce(residual)

    with caplog.at_level(logging.INFO, "fusion_passes"):
        capture(block, *tensors(2, 8, HIDDEN))
        capture(lambda x: x.sin(), *tensors(2, 8, HIDDEN, count=1))
    (record,) = [record for record in caplog.records if record.name == "fusion_passes"]
    assert "1 of 2 all-reduces fused (add_norm 1); left alone: graph_ends 1" in record.getMessage()


def test_reason_is_a_code_and_a_sentence() -> None:
    reason = NotFused("no_norm", "the sum goes nowhere")
    assert str(reason) == "no_norm: the sum goes nowhere"
    with pytest.raises(AssertionError):
        NotFused("because", "of that")


def test_every_code_is_used_and_every_used_code_is_in_the_table() -> None:
    package = Path(fusion_passes.__file__).parent
    text = "".join(path.read_text() for path in package.glob("*.py") if path.name != "reasons.py")
    for code in reasons.CODES:
        assert f'"{code}"' in text, f"{code} is never given"


def test_place_of_a_node_without_any() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    site = reporting.verdict(node, "graph", "norm")
    assert (site.module, site.source) == ("", "")


def half(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One all-reduce that fuses and one that does not, though a norm follows."""
    norm = torch.nn.functional
    return norm.rms_norm(residual + reduce(x), (HIDDEN,)), norm.layer_norm(residual + reduce(x.sin()), (HIDDEN,))


def test_strict_fails_the_compilation_with_the_report() -> None:
    compiled = torch.compile(half, options=fusion_passes.options(FusionConfig(strict=True)))
    with torch.no_grad(), compat.without_caches(), pytest.raises(Exception, match="all-reduces fused") as raised:
        compiled(*tensors(2, 8, HIDDEN))
    text = str(raised.value)
    assert "FusionError: 1 of 2 all-reduces fused (add_norm 1); left alone: norm_not_recognised 1" in text
    assert re.search(r"\n! all_reduce_1 \(.*programs\.py:\d+\): norm_not_recognised: ", text)
    assert re.search(r"\n  all_reduce \(.*\): add_norm\n", text)


def test_strict_accepts_what_leaves_nothing_to_be_desired() -> None:
    def block(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(reduce(x) + reduce(y), (HIDDEN,)).sin() @ reduce(x).sin()[0].T

    captured = capture(block, *tensors(2, 8, HIDDEN), config=FusionConfig(strict=True))
    assert captured.rules == ["norm_shared", "add_norm", "no_norm"]


@pytest.mark.parametrize("code", reasons.CODES)
def test_excused_reasons(code: str) -> None:
    site = reporting.SiteReport("all_reduce", False, None, NotFused(code, "text"), "", "", "graph")
    excused = {"disabled", "no_norm", "norm_shared", "single_rank", "above_limit", "max_token_num", "quant_device"}
    excused |= {"overlap_faster"}
    assert site.missed is (code not in excused)
    fused = reporting.SiteReport("all_reduce", True, "add_norm", None, "", "", "graph", left=NotFused(code, "text"))
    assert fused.missed is (code not in excused), "a quantisation that was left alone counts alike"


SCRIPT = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
import fusion_passes
from tests.support.programs import tensors
from tests.fusion_passes.test_reporting import half
with torch.no_grad():
    torch.compile(half, options=fusion_passes.options())(*tensors(2, 8, 64))
dist.destroy_process_group()
"""


def run_script(**environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT], env=variables, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )  # fmt: skip


def test_torch_logs_controls_what_is_logged() -> None:
    plain = run_script(TORCH_LOGS="fusion_passes").stderr
    assert "1 of 2 all-reduces fused (add_norm 1)" in plain
    assert "all_reduce_1 (" not in plain
    full = run_script(TORCH_LOGS="+fusion_passes").stderr
    assert "1 of 2 all-reduces fused (add_norm 1)" in full
    assert re.search(r"all_reduce_1 \(.*\): norm_not_recognised: ", full)
    assert "all-reduces fused" not in run_script().stderr


def test_structured_trace_holds_the_verdicts(tmp_path: Path) -> None:
    run_script(TORCH_TRACE=str(tmp_path))
    (log,) = tmp_path.iterdir()
    lines = log.read_text().splitlines()
    (at,) = [place for place, line in enumerate(lines) if '"name": "fusion_passes"' in line]
    assert '"artifact"' in lines[at]
    payload = next(line for line in lines[at + 1 :] if line.startswith("\t"))
    sites = json.loads(payload)
    assert [site["rule"] for site in sites] == ["add_norm", None]
    assert sites[1]["reason"]["code"] == "norm_not_recognised"


def reported(fake: FakeFlashInfer) -> tuple[str | None, list[str], str]:
    """What the report says of a fused site before its group has voted, and once it has and needs a workspace."""
    fusion_passes.reset_report()
    group = dist.new_group(list(range(dist.get_world_size())))

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = residual + funcol.all_reduce(x, "sum", group)  # type: ignore[arg-type]
        return torch.nn.functional.rms_norm(total, (HIDDEN,))

    capture(block, *tensors(2, 8, HIDDEN))
    (site,) = fusion_passes.report()
    before = site.problem
    with faked(fake):
        workspace.acquire(group, torch.bfloat16, CPU, 1000)
    found = before, [str(site.problem), site.rule or ""], str(site)
    dist.destroy_process_group(group)
    assert site.problem is None, "nothing is said of a group that is gone"
    return found


@pytest.mark.parametrize(
    ("fakes", "reason"),
    [
        ([{"facts": {"host": "a"}}, {"facts": {"host": "b"}}], "host differs: 'a' on rank 0, 'b' on rank 1"),
        ([{}, {"fails": {"create": "no peer access"}}], "rank 1 of the group: RuntimeError: no peer access"),
        ([{"free": 0}, {}], "rank 0 of the group: the workspace needs"),
    ],
    ids=["two hosts", "no peer access", "no memory"],
)
def test_what_only_the_ranks_together_know_is_in_the_report_of_each(
    ranks: Ranks, fakes: list[dict[str, Any]], reason: str
) -> None:
    for before, (problem, rule), line in ranks.run(of_rank, fakes):
        assert before is None
        assert rule == "add_norm"
        assert reason in problem
        assert line.endswith(f"add_norm; runs unfused: {problem}")


def of_rank(fakes: list[dict[str, Any]]) -> tuple[str | None, list[str], str]:
    return reported(FakeFlashInfer(**fakes[dist.get_rank()]))


def test_nothing_is_known_of_a_group_that_fuses(ranks: Ranks) -> None:
    for before, (problem, _), line in ranks.run(of_rank, [{}, {}]):
        assert before is None
        assert problem == "None"
        assert line.endswith(": add_norm")
