"""The settings of saves in a run: what waits, what goes on, and what is told of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ropewalk.checkpoint.disk import Disk, LocalDisk
from ropewalk.parallel.executor import StepResult
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun
from tests.tiny import make_run
from tests.train.runs import events, quick

PATIENCE_S = 60
"""For a machine that is busy; only a run that is wrong waits so long."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


class HeldDisk(LocalDisk):
    """Creates no file of a checkpoint before it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        self.came_in_time = True

    @contextmanager
    def create(self, path: Path) -> Iterator[Any]:
        if not self.may.wait(PATIENCE_S):
            self.came_in_time = False
            self.may.set()
        with super().create(path) as file:
            yield file


class ReleaseAfter(Hook):
    """Lets a disk go on after a step."""

    def __init__(self, disk: HeldDisk, step: int) -> None:
        self._disk, self._step = disk, step

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if run.step == self._step:
            self._disk.may.set()


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    disk = HeldDisk()
    run = make_run(tmp_path, train__steps=4, checkpoint__save_every_steps=2)
    train(run, hooks=[ReleaseAfter(disk, step=3)], disk=disk)
    assert disk.came_in_time, "the save of step 2 was waited for, and step 3 with it"
    assert [event["step"] for event in events(run, "saved")] == [2, 4]


class SlowDisk(LocalDisk):
    """Takes its time over every file."""

    @contextmanager
    def create(self, path: Path) -> Iterator[Any]:
        threading.Event().wait(0.05)
        with super().create(path) as file:
            yield file


def test_a_save_that_training_waits_for_is_told_as_a_stall(tmp_path: Path) -> None:
    disk: Disk = SlowDisk()
    run = make_run(tmp_path, train__steps=2, checkpoint__save_every_steps=1, checkpoint__write="blocking")
    train(run, disk=disk)
    stalls = [event["seconds"] for event in events(run, "saved")]
    assert len(stalls) == 2
    assert min(stalls) >= 0.05
