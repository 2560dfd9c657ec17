"""Settings of `[checkpoint]` do what they say, seen from a run or from what keeps its checkpoints."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.disk import LocalDisk, WritableFile
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.train.checkpointer import Checkpointer
from ropewalk.train.loop import train
from tests.checkpoint.test_background import state
from tests.tiny import make_run
from tests.train.runs import events, quick

PATIENCE_S = 20
"""Only what is wrong waits for so long."""


class Slow(LocalDisk):
    """A disk that takes at least SECONDS for each checkpoint."""

    SECONDS = 0.05

    def make_folder(self, path: Path) -> None:
        time.sleep(self.SECONDS)
        super().make_folder(path)


def test_a_run_saves_every_so_many_steps_and_tells_how_long_each_save_stalls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    settings = Checkpoints(save_every_steps=3, keep_last=9, write="blocking")
    run = make_run(tmp_path, train__steps=8, checkpoint=settings)
    train(run, disk=Slow())
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == [f"step-0000000{n}" for n in (3, 6, 8)]
    saved = events(run, "saved")
    assert [event["step"] for event in saved] == [3, 6, 8]
    assert all(event["seconds"] >= Slow.SECONDS for event in saved)


class Watching(LocalDisk):
    """Notes whether training had gone on when the disk was first asked, for which it waits."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.went_on: list[bool] = []

    def make_folder(self, path: Path) -> None:
        self.went_on.append(self.goes_on.wait(PATIENCE_S))
        super().make_folder(path)


def test_training_goes_on_before_a_save_in_the_background_is_written(tmp_path: Path) -> None:
    disk = Watching()
    checkpointer = Checkpointer(tmp_path, Checkpoints(write="background"), warn=pytest.fail, disk=disk)
    checkpointer.save(state(1))
    disk.goes_on.set()
    checkpointer.settle()
    assert disk.went_on[0]
    assert [saved.step for saved in checkpointer.finished()] == [1]
    checkpointer.close()


def test_training_waits_for_a_blocking_save(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, Checkpoints(write="blocking"), warn=pytest.fail)
    checkpointer.save(state(1))
    (path,) = list_checkpoints(tmp_path / "checkpoints")
    assert verify_checkpoint(path) == []
    checkpointer.close()


class Meeting(LocalDisk):
    """Files are begun side by side, as many as there are threads, or after a long wait."""

    def __init__(self, threads: int) -> None:
        self._coordinator = threading.Barrier(threads)
        self.met = 0

    def create(self, path: Path) -> WritableFile:
        if path.name.endswith(".safetensors"):
            self._coordinator.wait(PATIENCE_S)
            self.met += 1
        return super().create(path)


def test_a_checkpoint_is_written_by_as_many_threads_as_set(tmp_path: Path) -> None:
    disk = Meeting(2)
    checkpointer = Checkpointer(tmp_path, Checkpoints(threads=2), warn=pytest.fail, disk=disk)
    checkpointer.save(state(1))
    checkpointer.settle()
    (saved,) = checkpointer.finished()
    assert saved.error is None
    assert disk.met == 2
    checkpointer.close()
