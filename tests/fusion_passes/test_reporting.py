"""Verdicts as data and as a log line, and the table of reasons."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

import fusion_passes
from fusion_passes import NotFused, reasons, reporting
from tests.support.capture import capture
from tests.support.programs import HIDDEN, NORMS, AddNorm, reduce, tensors

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
