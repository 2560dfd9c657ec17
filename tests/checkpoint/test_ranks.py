"""Several ranks keep one run: they save one state, go on from the same one, and do not get in each other's way."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from ropewalk.base.errors import DataError, StorageError
from ropewalk.checkpoint.config import Checkpoints, Tiers
from ropewalk.checkpoint.disk import Disk
from ropewalk.checkpoint.faulty import Fault, FaultyDisk
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.tiers.memory_tier import MemoryTier
from ropewalk.checkpoint.tiers.tier_writer import memory_folder
from ropewalk.checkpoint.write.save import save
from ropewalk.config.ranks import Ranks
from ropewalk.train.checkpointer import Checkpointer
from tests.checkpoint.meeting import Threads
from tests.checkpoint.newest import continued
from tests.checkpoint.shards import flip, keep, same, state

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class Run:
    """Two ranks of a run as threads of this process."""

    def __init__(
        self,
        folder: Path,
        *,
        settings: Checkpoints | None = None,
        by_rank: list[Checkpoints] | None = None,
        disks: tuple[Disk | None, Disk | None] = (None, None),
        launch: str = "a",
    ) -> None:
        threads = Threads(2)
        self.told: list[str] = []
        given = by_rank or [settings or Checkpoints()] * 2
        self.keepers = self.each(
            lambda rank: Checkpointer(
                folder,
                given[rank],
                warn=self.told.append,
                ranks=2,
                place=Ranks(rank, 2, rank),
                attempt=launch,
                coordinator=threads.of(rank),
                disk=disks[rank],
            )
        )

    def each(self, work: Callable[[int], T]) -> list[T]:
        """What `work` gives for each rank, both at once."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(work, range(2)))

    def close(self) -> None:
        for checkpointer in self.keepers:
            checkpointer.close()


def test_ranks_go_on_from_the_step_that_rank_0_finds(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / "checkpoints", state(step))
    flip(tmp_path / "checkpoints/step-00000020/model.safetensors", bit=4001)
    run = Run(tmp_path)
    found = run.each(lambda rank: continued(run.keepers[rank]))
    assert all(one is not None and same(one, state(10)) for one in found)
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000010"]
    assert (tmp_path / "checkpoints/step-00000020.damaged").exists()
    run.close()


def test_no_rank_starts_from_scratch_beside_damaged_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", state(10))
    flip(tmp_path / "checkpoints/step-00000010/model.safetensors", bit=4001)
    run = Run(tmp_path)

    def fails(rank: int) -> str:
        with pytest.raises(DataError, match="no checkpoint is whole") as caught:
            continued(run.keepers[rank])
        return str(caught.value)

    own, told = run.each(fails)
    assert told == f"rank 0: {own}"
    run.close()


def test_a_rank_that_is_ahead_keeps_what_it_has_begun(tmp_path: Path) -> None:
    run = Run(tmp_path, settings=Checkpoints(keep_last=1))
    behind, ahead = run.keepers
    crashed = tmp_path / "checkpoints/step-00000001.before-1.partial"
    crashed.mkdir(parents=True)
    for step in (1, 2):
        ahead.save(state(step))
        ahead.settle()
    save(tmp_path / "checkpoints/best", state(1))
    best = tmp_path / "checkpoints/best/step-00000002.a-3.partial"
    best.mkdir()
    behind.save(state(1))
    behind.settle()
    # The retention after step 1 takes what a crash left, and not what rank 1 has begun of step 2.
    assert not crashed.exists()
    assert (tmp_path / "checkpoints/step-00000002.a-2.partial").exists()
    assert best.exists()
    behind.save(state(2))
    behind.settle()
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == ["step-00000002"]
    assert same(load(tmp_path / "checkpoints/step-00000002"), state(2))
    assert run.each(lambda rank: run.keepers[rank].holds(2)) == [True, True]
    run.close()


def test_rank_0_gives_up_at_once_when_another_rank_cannot_write(tmp_path: Path) -> None:
    full = FaultyDisk(Fault(kind="error", code=errno.ENOSPC, on=("write",), times=1))
    run = Run(tmp_path, disks=(None, full))

    def save_and_settle(rank: int) -> Exception | None:
        run.keepers[rank].save(state(1))
        run.keepers[rank].settle()
        return run.keepers[rank].finished()[0].error

    first, second = run.each(save_and_settle)
    assert isinstance(first, StorageError)
    assert "rank-00001.json: this rank could not write its shard" in str(first)
    assert isinstance(second, StorageError)
    assert not list_checkpoints(tmp_path / "checkpoints")
    # The disk is itself again: the same step is saved by another try.
    assert run.each(save_and_settle) == [None, None]
    assert same(load(tmp_path / "checkpoints/step-00000001"), state(1))
    run.close()


def test_every_rank_reads_the_best_when_it_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def best(rank: int) -> torch.Tensor:
        run.keepers[rank].save_best(state(3))
        return run.keepers[rank].best_weights(3)["w"]

    assert all(torch.equal(weights, state(3).model["w"]) for weights in run.each(best))
    run.close()


def test_ranks_save_at_the_same_steps_whatever_their_clocks_say(tmp_path: Path) -> None:
    run = Run(tmp_path, settings=Checkpoints(save_every="auto"))

    def decide(rank: int) -> tuple[int, list[int]]:
        checkpointer = run.keepers[rank]
        for _ in range(5):
            checkpointer.interval._frequency.saw_steps(0.1 + rank)
        checkpointer.interval._frequency.saw_save(blocked_s=0.5 + 3 * rank, persist_s=1.0 + 100 * rank)
        decisions = [checkpointer.decide() for _ in range(40)]
        assert sum(decision is not None for decision in decisions) == 1
        return checkpointer.interval._decision.steps, [
            step for step in range(1, 2000) if checkpointer.interval.due(step)
        ]

    left, right = run.each(decide)
    assert left == right
    run.close()


@pytest.mark.parametrize(("both", "step"), [(True, 20), (False, 10)])
def test_ranks_take_the_newest_state_that_all_can_put_together(tmp_path: Path, both: bool, step: int) -> None:
    folders = [tmp_path / "memory-0", tmp_path / "memory-1"]
    for rank, folder in enumerate(folders):
        folder.mkdir()
        memory = MemoryTier(memory_folder(str(folder)), limit_bytes=1 << 20)
        for shard in (0, 1) if both or rank == 0 else ():
            keep(memory, 20, rank=shard, world=2, attempt="before")
    save(tmp_path / "run/checkpoints", state(10))
    settings = [
        Checkpoints(tiers=Tiers(memory="on", folder=str(folder), memory_bytes=1 << 20, run="run")) for folder in folders
    ]
    run = Run(tmp_path / "run", by_rank=settings)

    def found(rank: int) -> State | None:
        state_found = continued(run.keepers[rank])
        run.keepers[rank].settle()
        return state_found

    assert all(one is not None and same(one, state(step)) for one in run.each(found))
    # What came from memory alone is on the disk now.
    assert run.each(lambda rank: run.keepers[rank].holds(step)) == [True, True]
    assert not verify_checkpoint(list_checkpoints(tmp_path / "run/checkpoints")[-1])
    run.each(lambda rank: run.keepers[rank].end())
    assert not any(memory_folder(str(folder)).joinpath("run").exists() for folder in folders)
    run.close()


@pytest.mark.parametrize(
    ("worlds", "kills", "timeout_s"),
    [("2,4", 12, 100), pytest.param("2,4,3", 300, 1200, marks=pytest.mark.slow)],
    ids=["12", "300"],
)
def test_killing_one_of_several_ranks_costs_no_acknowledged_save_and_no_bit(
    tmp_path: Path, worlds: str, kills: int, timeout_s: float
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("kill_ranks.py")), str(tmp_path), worlds, str(kills), "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    assert int(told[0]) == kills
    # Few strikes must fall between saves, or nothing was tried; and the run must get on in spite of them.
    assert int(told[2]) > kills / 4
    assert int(told[-1]) > kills / 2
