"""The newest step for which every shard is whole somewhere, against trying every step by hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError, StorageError
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.checkpoint.read.load_latest import restore
from ropewalk.checkpoint.read.tiered_load import DiskSource
from ropewalk.checkpoint.tiers.memory_tier import MemorySource, MemoryTier
from ropewalk.checkpoint.tiers.tier import CopyOffer
from ropewalk.checkpoint.write.save import save
from tests.checkpoint.shards import flip, keep, same, state

STEPS, RANKS, PLACES = (1, 2, 3), 2, 3


class Named(MemorySource):
    """A memory tier that stands for any place."""

    def __init__(self, memory: MemoryTier, name: str) -> None:
        super().__init__(memory, "run")
        self.name = name


copies = st.dictionaries(
    st.tuples(st.sampled_from(STEPS), st.integers(0, RANKS - 1), st.integers(0, PLACES - 1)),
    st.sampled_from(["whole", "model", "optimizer", "manifest"]),
)


@settings(max_examples=60, deadline=None)
@given(copies=copies)
def test_any_mix_of_places_gives_the_newest_step_that_is_whole(
    tmp_path_factory: pytest.TempPathFactory, copies: dict[tuple[int, int, int], str]
) -> None:
    folder = tmp_path_factory.mktemp("places")
    memories = [MemoryTier(folder / str(place)) for place in range(PLACES)]
    for (step, rank, place), health in copies.items():
        key = keep(memories[place], step, rank=rank, world=RANKS)
        if health != "whole":
            name = "manifest.json" if health == "manifest" else f"{health}-{rank:05d}.safetensors"
            flip(memories[place].path(key) / name, bit=999)
    # Two slots a rank: what was kept earlier than the last two is gone, by design.
    there = {(key.step, key.rank, place) for place, memory in enumerate(memories) for key in memory.shards("run")}
    files = {"model", "optimizer"}
    possible = []
    for step in STEPS:
        healths = {
            rank: [copies[step, rank, place] for place in range(PLACES) if (step, rank, place) in there]
            for rank in range(RANKS)
        }
        have = all(
            any(health != "manifest" and health != file for health in healths[rank])
            for rank in range(RANKS)
            for file in files
        )
        possible += [step] if have else []
    sources = [Named(memory, f"place {number}") for number, memory in enumerate(memories)]
    expected = max(possible, default=None)
    try:
        found, report = restore(sources, scratch=folder / "scratch")
    except DataError:
        assert expected is None
        assert there
        return
    if expected is None:
        assert not there
        assert found is None
        return
    assert found is not None
    assert same(found, state(expected))
    assert report.step == expected
    assert set(report.files) == {f"{g}-{r:05d}.safetensors" for g in files for r in range(RANKS)} | {"tokenizer.json"}
    assert not (folder / "scratch").exists()
    # What was found damaged is out of sight, and only that.
    for place, memory in enumerate(memories):
        for key in memory.shards("run"):
            assert copies[key.step, key.rank, place] != "manifest"
        gone = {k for k in there if k[2] == place} - {(k.step, k.rank, place) for k in memory.shards("run")}
        assert all(copies[one] != "whole" for one in gone)
    if any(copies[one] == "manifest" for one in there):
        assert report.damaged


def test_the_disk_serves_what_memory_lacks_and_the_report_says_so(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path / "memory")
    save(tmp_path / "disk", state(5))
    key = keep(memory, 5)
    flip(memory.path(key) / "optimizer.safetensors", bit=2000)
    sources = [MemorySource(memory, "run"), DiskSource(tmp_path / "disk", "run")]
    found, report = restore(sources, scratch=tmp_path / "scratch")
    assert found is not None
    assert same(found, state(5))
    assert {name: taken.source for name, taken in report.files.items()} == {
        "model.safetensors": "own memory",
        "optimizer.safetensors": "disk",
        "tokenizer.json": "own memory",
    }
    assert len(report.damaged) == 1
    assert "own memory: step 5" in report.damaged[0]
    assert "optimizer.safetensors" in report.damaged[0]
    assert "exp_avg/w" in report.damaged[0]
    assert report.bytes == sum(report.sources.values())
    assert memory.shards("run") == []


def test_a_newer_step_in_memory_comes_before_an_older_one_on_the_disk(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path / "memory")
    save(tmp_path / "disk", state(5))
    keep(memory, 8)
    sources = [MemorySource(memory, "run"), DiskSource(tmp_path / "disk", "run")]
    assert restore(sources, scratch=tmp_path / "scratch")[1].step == 8
    shutil.rmtree(tmp_path / "memory/run")
    assert restore(sources, scratch=tmp_path / "scratch")[1].step == 5


def test_a_damaged_checkpoint_on_the_disk_is_set_aside_after_it_served_what_it_could(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path / "memory")
    path = save(tmp_path / "disk", state(5))
    key = keep(memory, 5)
    flip(path / "model.safetensors", bit=1500)
    flip(memory.path(key) / "optimizer.safetensors", bit=1500)
    sources = [DiskSource(tmp_path / "disk", "run"), MemorySource(memory, "run")]
    found, report = restore(sources, scratch=tmp_path / "scratch")
    assert found is not None
    assert same(found, state(5))
    assert len(report.damaged) == 1
    assert list_checkpoints(tmp_path / "disk") == []
    assert (tmp_path / "disk/step-00000005.damaged").is_dir()


def test_shards_of_two_launches_are_not_mixed(tmp_path: Path) -> None:
    memory = MemoryTier(tmp_path)
    keep(memory, 1, rank=0, world=2, attempt="first")
    keep(memory, 1, rank=1, world=2, attempt="first")
    keep(memory, 2, rank=0, world=2, attempt="first")
    keep(memory, 2, rank=1, world=2, attempt="second")
    found, report = restore([MemorySource(memory, "run")], scratch=tmp_path / "scratch")
    assert found is not None
    assert found.step == 1
    assert any("step 2" in told and "missing" in told for told in report.passed_over)


def test_a_place_that_does_not_answer_is_told_and_passed_over(tmp_path: Path) -> None:
    class Gone:
        name = "peer 10.0.0.9:1"
        checks = True

        def offers(self) -> tuple[list[CopyOffer], list[str]]:
            raise StorageError("timed out")

        def fetch(self, offer: CopyOffer, file: str, target: Path, chunks: Sequence[int]) -> None:
            raise AssertionError

        def quarantine(self, offer: CopyOffer) -> None:
            raise AssertionError

    save(tmp_path / "disk", state(5))
    found, report = restore([Gone(), DiskSource(tmp_path / "disk", "run")], scratch=tmp_path / "scratch")
    assert found is not None
    assert report.unreachable == ["peer 10.0.0.9:1: timed out"]


def test_nothing_anywhere_is_a_fresh_start(tmp_path: Path) -> None:
    found, report = restore([MemorySource(MemoryTier(tmp_path / "memory"), "run")], scratch=tmp_path / "scratch")
    assert found is None
    assert report.files == {}
