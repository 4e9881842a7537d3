"""One profile for all ranks, whatever the others have, and limits that decide from then on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import custom_ops
import fusion_passes
from custom_ops import declared, limits, machine, tuning, workspace
from custom_ops.limits import Limits
from custom_ops.profile import Profile
from tests.support import profiles
from tests.support.fake_flashinfer import CPU, FakeFlashInfer, faked
from tests.support.ranks import Ranks

OTHER = (profiles.ROW._replace(one_shot_bytes=7),)
FACTS = machine.facts
"""The real ones, which the fake replaces."""


def write(folder: Path, name: str = "profile.json", **changes: object) -> str:
    path = folder / name
    path.write_text(profiles.profile(torch=str(torch.__version__), **changes).to_json())
    return str(path)


@contextmanager
def on_two_h200(topic: str) -> Iterator[FakeFlashInfer]:
    """This process believes that it has an H200; what it adopts is forgotten at the end."""
    with (
        faked() as fake,
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(machine, "default_device", lambda: CPU),
        patch.object(tuning, "_KEY", topic),
        patch.object(tuning, "TIMEOUT", timedelta(seconds=2)),
        patch.dict(limits.ADOPTED, clear=True),
    ):
        yield fake


def outcome(topic: str, *paths: str | None) -> str | Profile | None:
    """What a rank gets for its path; None asks for nothing."""
    path = paths[dist.get_rank()]
    with on_two_h200(topic):
        try:
            return None if path is None else custom_ops.use_profile(path)
        except ValueError as error:
            return str(error)


def test_the_file_of_the_first_rank_serves_all(ranks: Ranks, tmp_path: Path) -> None:
    one, other = write(tmp_path), write(tmp_path, "other.json", crossovers=OTHER)
    for mine in (one, other, str(tmp_path / "missing.json")):
        first, second = ranks.run(outcome, f"serves all {mine}", one, mine)
        assert isinstance(first, Profile)
        assert first == second
        assert first.crossovers == (profiles.ROW,)


def test_a_bad_file_of_the_first_rank_fails_on_all(ranks: Ranks, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.json")
    first, second = ranks.run(outcome, "bad file", missing, write(tmp_path))
    assert first == second
    assert "missing.json': cannot be read" in str(first)


def test_a_rank_that_asks_alone_is_told_so_in_bounded_time(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(outcome, "alone", None, write(tmp_path), timeout=30)
    assert first is None
    assert "rank 0 uses none (waited 0:00:02); all ranks must ask for it" in str(second)


def another_device(path: str) -> str:
    with on_two_h200("another device"), patch.object(machine, "name", lambda device: "NVIDIA B200"):
        with pytest.raises(ValueError, match="measured with device 'NVIDIA H200', here is 'NVIDIA B200'") as found:
            custom_ops.use_profile(path)
        assert not limits.ADOPTED
        return str(found.value)


def test_profile_of_another_device_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert "tuning profile '" in ranks.run(another_device, write(tmp_path))[0]


def decides(one: str, other: str) -> tuple[Limits, Limits, Limits]:
    """Limits of a group: before, with the profile, and with a second one, which is refused."""
    group = dist.new_group(list(range(dist.get_world_size())))
    with on_two_h200("decides"):
        before = workspace.state_of(group, CPU).limits
        custom_ops.use_profile(one)
        with_one = workspace.state_of(group, CPU).limits
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="this process group uses another one; use one for all"):
                custom_ops.use_profile(other)
        return before, with_one, workspace.state_of(dist.new_group([0, 1]), CPU).limits


def test_groups_that_have_voted_and_those_to_come_follow(ranks: Ranks, tmp_path: Path) -> None:
    one, other = write(tmp_path), write(tmp_path, "other.json", crossovers=OTHER)
    for before, with_one, later in ranks.run(decides, one, other):
        assert before == limits.measured()["NVIDIA H200", 2]
        assert with_one == later == profiles.profile().limits


def test_two_profiles_in_one_process_are_refused(tmp_path: Path) -> None:
    with on_two_h200("one process"):
        custom_ops.use_profile(write(tmp_path))
        custom_ops.use_profile(write(tmp_path, "again.json"))
        with pytest.raises(ValueError, match="two tuning profiles for 2 ranks of 'NVIDIA H200' in one process"):
            custom_ops.use_profile(write(tmp_path, "other.json", crossovers=OTHER))
        assert limits.for_device("NVIDIA H200", 2) == profiles.profile().limits
        assert limits.for_device("NVIDIA H200", 4) == limits.DEFAULTS[4]


def votes(path: str | None) -> str | None:
    """The problem of a new group of which only the first rank follows a profile."""
    group = dist.new_group([0, 1])
    with on_two_h200("votes"), patch.object(machine, "facts", FACTS):
        if dist.get_rank() == 0 and path is not None:
            limits.adopt("NVIDIA H200", 2, Limits(1, 1, "mine alone"))
        return workspace.state_of(group, CPU).problem


def test_ranks_with_other_limits_run_unfused(ranks: Ranks) -> None:
    assert ranks.run(votes, None) == [None, None]
    first, second = ranks.run(votes, "alone")
    assert first == second
    assert "limits differs: [1, 1, 'mine alone', 0, []] on rank 0" in str(first)


def configured(*configs: dict[str, Any]) -> str | None:
    """The problem of a new group whose ranks have asked for these configurations."""
    group = dist.new_group([0, 1])
    with on_two_h200("configured"), patch.object(machine, "facts", FACTS), patch.dict(declared._DECLARED, clear=True):
        fusion_passes.options(fusion_passes.FusionConfig(**configs[dist.get_rank()]))
        return workspace.state_of(group, CPU).problem


def test_ranks_with_other_configurations_run_unfused(ranks: Ranks) -> None:
    assert ranks.run(configured, {}, {}) == [None, None]
    assert ranks.run(configured, {"strict": True}, {}) == [None, None]
    for change in ({"norm_path": "overlap"}, {"fuse_allreduce_rms": False}, {"check_ranks": True}):
        first, second = ranks.run(configured, {}, change)
        assert first == second
        assert "configuration differs: " in str(first)
        ((name, value),) = change.items()
        assert f"{name}={value!r}" in str(first)


def test_without_cuda_a_profile_is_read_and_decides_nothing(tmp_path: Path) -> None:
    with patch.dict(limits.ADOPTED, clear=True):
        assert custom_ops.use_profile(write(tmp_path)).crossovers == (profiles.ROW,)
        assert not limits.ADOPTED or torch.cuda.is_available()


@pytest.mark.usefixtures("fake_group")
def test_made_up_group_reads_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `explain` makes one, with the profile of the environment."""
    monkeypatch.setenv("FUSION_PASSES_TUNING_PROFILE", write(tmp_path))
    with patch.dict(limits.ADOPTED, clear=True):
        made = fusion_passes.AllReduceRMSFusionPass()
    assert made.profile is not None
    assert made.profile.crossovers == (profiles.ROW,)
