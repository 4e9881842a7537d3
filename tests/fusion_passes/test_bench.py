"""What measurements are made of, without a GPU: crossovers, attribution, shapes, tables and plots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fusion_passes
from custom_ops.limits import Limits, Row
from custom_ops.profile import Measurement
from fusion_passes import fake_machine
from fusion_passes.bench import attribution, paths, plot, tune
from fusion_passes.bench.decode_step import Step
from fusion_passes.bench.op_sweep import Point
from fusion_passes.bench.pass_cost import Cost
from fusion_passes.bench.pdl import Overlapped
from fusion_passes.bench.stack import MODELS, Stack
from fusion_passes.bench.timing import Timing
from fusion_passes.cli import bench, bench_view
from tests.support import profiles


def at(tokens: int, *times: float | None, hidden: int = 64, dtype: str = "bfloat16") -> Measurement:
    one_shot, two_shot, overlap, unfused = times
    assert unfused is not None
    return Measurement(tokens, hidden, dtype, one_shot, two_shot, overlap, unfused)


ROW_BYTES = 64 * 2


def crossing(*points: Measurement, equal: bool = True) -> list[int]:
    """Largest number of tokens of 64 elements for one-shot, two-shot and overlap."""
    (row,) = tune.crossovers(points, equal)
    return [nbytes // ROW_BYTES for nbytes in row[1:]]


class TestCrossovers:
    def test_each_ends_where_another_is_faster(self) -> None:
        points = [
            at(1, 2, None, 1, 9),
            at(4, 3, 5, 3, 9),
            at(16, 6, 4, 7, 9),
            at(64, 20, 8, 30, 9),
            at(256, 60, 40, 50, 30),
        ]
        assert crossing(*points) == [4, 64, 4]

    def test_one_that_is_faster_everywhere_serves_everything(self) -> None:
        assert crossing(at(1, 1, None, 2, 9), at(4, 2, 3, 4, 9)) == [4, 4, 0]

    def test_a_slower_size_ends_the_range_whatever_follows(self) -> None:
        assert crossing(at(1, 1, None, 1, 9), at(4, 10, 11, 9, 9), at(16, 3, 4, 3, 9)) == [1, 1, 1]

    def test_of_unequal_strategies_the_one_that_serves_more_is_taken_alone(self) -> None:
        points = [at(1, 2, None, 3, 9), at(4, 3, 2, 4, 9), at(16, 8, 4, 9, 9), at(64, 20, 8, 30, 9)]
        assert crossing(*points, equal=False) == [16, 16, 0], "two-shot does not serve the first size"
        late = [at(4, 3, 2, 4, 9), at(16, 10, 4, 9, 9)]
        assert crossing(*late, equal=False) == [0, 16, 0]

    def test_every_type_must_gain(self) -> None:
        slow = at(4, 10, 11, 10, 9, dtype="float16")
        assert crossing(at(1, 1, None, 2, 9), at(4, 1, 2, 2, 9), at(1, 1, None, 2, 9, dtype="float16"), slow) == [
            1,
            1,
            0,
        ]

    def test_a_size_that_does_not_fit_ends_the_range(self) -> None:
        assert crossing(at(1, 1, None, 2, 9), at(4, None, None, None, 9)) == [1, 1, 0]

    def test_hidden_sizes_have_rows_of_their_own(self) -> None:
        found = tune.crossovers([at(4, 1, 2, 3, 9), at(4, 10, 11, 12, 9, hidden=128)], True)
        assert found == (Row(64, 4 * ROW_BYTES, 4 * ROW_BYTES, 0), Row(128, 0, 0, 0))

    def test_the_shipped_profile_is_what_its_points_say(self) -> None:
        from custom_ops import profile

        for file in (Path(profile.__file__).parent / "profiles").glob("*.json"):
            tuned = profile.parse(file.read_text())
            assert tuned.crossovers == tune.crossovers(tuned.points, tuned.strategies_equal)


class TestAttribution:
    def test_by_kind_and_gaps(self) -> None:
        found = attribution.attribute(
            [
                ("nvjet_tst_64x8", 0.0, 4.0), ("triton_red_fused_add_0", 5.0, 6.0), ("ncclDevKernel_AllReduce_Sum", 6.5, 9.5),
                ("allreduce_fusion_kernel_oneshot_lamport", 10.0, 12.0), ("flash_fwd_splitkv_kernel", 12.0, 13.0), ("memset", 13.0, 13.5),
            ]
        )  # fmt: skip
        assert found == {
            "matrix products": 4.0, "Inductor's kernels": 1.0, "all-reduce": 5.0, "attention": 1.0,
            "other kernels": 0.5, "between kernels": 2.0,
        }  # fmt: skip

    def test_what_two_kernels_share_counts_once(self) -> None:
        found = attribution.attribute([("gemm", 0.0, 4.0), ("triton_poi", 3.0, 5.0), ("triton_poi", 3.5, 4.5)])
        assert found["matrix products"] + found["Inductor's kernels"] == 5.0
        assert found["between kernels"] == 0.0

    def test_nothing_ran(self) -> None:
        assert attribution.attribute([]) == {}


SMALL = {
    "llama-8b": {"hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 4},
    "qwen3-30b-a3b": {
        "hidden": 256,
        "intermediate": 64,
        "heads": 8,
        "kv_heads": 4,
        "head": 32,
        "experts": 16,
        "chosen": 4,
    },
    "gemma3-12b": {"hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 4, "head": 64},
}


@pytest.mark.parametrize("context", [16, 0], ids=["decode", "prefill"])
@pytest.mark.parametrize("model", MODELS)
def test_every_all_reduce_of_the_shapes_fuses(model: str, context: int) -> None:
    shape = replace(MODELS[model], layers=2, context=context, **SMALL[model])
    with fake_machine.process_group(2), torch.no_grad():
        stack = Stack(shape, 4, 2).to(torch.bfloat16)
        x, angles = torch.randn(4, shape.hidden).to(torch.bfloat16), shape.angles(4)
        assert stack(x, angles).isfinite().all()
        found = fusion_passes.inspect_fusion(stack, x, angles, world_size=2)
    assert Counter(site.verdict for site in found.sites) == {"norm" if shape.sandwich else "add_norm": 4}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("path", paths.PATHS)
def test_options_of_every_path_are_ones_that_inductor_knows(path: str) -> None:
    from torch._inductor import config

    options = paths.options(path)
    assert bool(options) == (path != paths.STOCK)
    with config.patch(options):
        assert all(getattr(config, name.split(".")[0], None) is not None for name in options)


def timing(median: float) -> Timing:
    return Timing(median, median * 0.9, median * 1.1)


POINTS = [
    Point(tokens, 64, 2, None, False, {"fused": timing(tokens), "overlap": timing(tokens), "stock": timing(2.5 * tokens)}, {"fused": "one_shot"})
    for tokens in (1, 4)
]  # fmt: skip
STEPS = [
    Step("llama-8b", 16, "bf16", {"fused": timing(3), "stock": timing(3.6)}, {"fused": {"add_norm": 5}}, {}, {"fused": {"attention": 1.25}}),
    Step("llama-8b", 16, "fp8", {"fused": timing(3), "norms": timing(3.5), "stock": timing(3.9)}, {"fused": {"add_norm_fp8": 5}}),
]  # fmt: skip


def test_plots_are_written(tmp_path: Path) -> None:
    limits = Limits(128, 256, "test")
    plot.op_sweep(POINTS, limits, "title", tmp_path / "op.png")
    plot.op_sweep(POINTS, None, "title", tmp_path / "no_limits.png")
    plot.steps(STEPS, "title", tmp_path / "steps.png")
    plot.profile(
        [profiles.POINT, replace(profiles.POINT, tokens=32, two_shot=None)], limits, "title", tmp_path / "profile.png"
    )
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG"), path


def test_tables_show_medians_quartiles_and_ratios() -> None:
    console = Console(record=True, width=200)
    measured = bench.Measured(
        "GPU",
        "2",
        "3",
        2,
        Limits(1, 1, "test"),
        POINTS,
        POINTS,
        STEPS,
        [Overlapped("router", 4, timing(4), timing(2), timing(1.6))],
    )
    bench_view.show(console, [Cost(2, 90, 4, 0.002, 1.0, 2.0)], measured)
    text = console.export_text()
    for shown in (
        "0.50",
        "1.0 (0.9-1.1), 2.50",
        "3.0 (2.7-3.3), 1.20",
        "3.5 (3.1-3.9), 1.11",
        "1.2",
        "router",
        "1.6 (1.4-1.8), 2.50",
    ):
        assert shown in text, shown
