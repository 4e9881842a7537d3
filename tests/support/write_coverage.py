"""Write docs/coverage.md: `python -m tests.support.write_coverage`, or `make coverage`."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import torch
from rich.progress import track

from tests.support.zoo import RELEASE, TORCH, Row

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
COLUMNS = "| architecture | all-reduces | fused | left alone |\n|---|---|---|---|\n"
EXPECTED = {"norm_shared", "no_norm"}
"""Reasons that come with the architecture: two sums meet in one norm, or none follows."""


def rows() -> list[Row]:
    """The rows of the page."""
    lines = PAGE.read_text().splitlines()
    return [Row.parse(line) for line in lines if line.startswith("| ") and "ForCausalLM" in line]


def page(table: list[Row], notes: str) -> str:
    """Text of the page."""
    whole = [row for row in table if row.fuses and row.reasons <= EXPECTED]
    some = [row for row in table if row.fuses and row not in whole]
    nothing = [row for row in table if row.fused == ""]
    failing = [row for row in table if row.fused == "-"]
    head = (
        "# Coverage\n\n"
        f"Every `*ForCausalLM` of transformers {RELEASE} that has a tensor-parallel plan: tiny random models with the "
        f"model's own plan over two ranks, [2, 16] tokens, bfloat16, torch {TORCH}, on CPUs, up to the hook. "
        "`make coverage` writes this page; `tests/fusion_passes/test_coverage.py` holds every row, and compares values "
        "between two real ranks for a tenth of them.\n\n"
        f"{len(table)} architectures: in {len(whole)} every all-reduce with a norm of its own fuses; in {len(some)} more "
        f"some do; in {len(nothing)} none does; {len(failing)} do not run in eager mode with their own plan.\n\n"
    )
    return f"{head}{notes}{COLUMNS}" + "\n".join(map(str, table)) + "\n"


def notes() -> str:
    """What stands between the head of the page and its table; written by hand."""
    text = PAGE.read_text()
    return text[text.index("## Why") : text.index(COLUMNS)] if "## Why" in text else ""


def main() -> None:
    """Measure all and write."""
    os.environ["TQDM_DISABLE"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    PAGE.write_text(page(measure_all(), notes()))


def measure_all() -> list[Row]:
    """Measure every architecture on two processes."""
    context = torch.multiprocessing.get_context("spawn")
    from tests.support.zoo import architectures, measure

    names = architectures()
    with context.Pool(2, _start, maxtasksperchild=30) as pool:
        return list(track(pool.imap(measure, names), "tracing", total=len(names)))


def _start() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


if __name__ == "__main__":
    main()
