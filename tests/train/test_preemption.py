"""A scheduler that wants the machine back finds the run saved and gone, status 0, in the grace time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ropewalk.base.errors import Preempted
from ropewalk.checkpoint.faulty import Fault, FaultyDisk
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.parallel.executor import StepResult
from ropewalk.train.config import Faults
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun
from tests.tiny import make_run
from tests.train.runs import events, final_files, quick, train_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


class SignalAfter(Hook):
    """Sends this process a signal after a step, and again while it leaves, as Slurm does."""

    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if run.step == self._step:
            os.kill(os.getpid(), self._number)
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=str)
@pytest.mark.parametrize("step", [1, 4, 6])
def test_the_step_at_hand_is_saved_and_the_same_command_continues(tmp_path: Path, number: int, step: int) -> None:
    whole, run = make_run(tmp_path / "whole"), make_run(tmp_path / "preempted")
    train(whole)
    with pytest.raises(Preempted, match=f"step {step} is saved") as caught:
        train(run, hooks=[SignalAfter(step, number)])
    assert caught.value.exit_code == 0
    assert [int(path.name[5:]) for path in list_checkpoints(run / "checkpoints")][-1] == step
    (event,) = events(run, "preempted")
    assert (event["step"], event["saved"]) == (step, True)
    train(run)
    assert final_files(run) == final_files(whole)


def test_when_the_disk_is_too_slow_the_end_comes_in_time_all_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__faults=Faults(grace_s=0.5))
    train_until(run, 4)
    disk = FaultyDisk(Fault(kind="hang", on=("write",)))
    try:
        with pytest.raises(Preempted, match="no time to save step 5, older checkpoints are intact"):
            train(run, hooks=[SignalAfter(5, signal.SIGTERM)], disk=disk)
        found = list_checkpoints(run / "checkpoints")
        assert [path.name for path in found] == ["step-00000003"]
        assert verify_checkpoint(found[0]) == []
    finally:
        disk.healed.set()


def test_the_worker_ends_with_0(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__steps=100_000, checkpoint__save_every_steps=99_999)
    worker = subprocess.Popen(
        [sys.executable, "-m", "ropewalk.train", str(run)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not events(run, "step"):
        time.sleep(0.05)
    worker.send_signal(signal.SIGUSR1)
    assert worker.wait(timeout=100) == 0
    assert worker.stderr
    assert "is saved; the same command continues" in worker.stderr.read()
    assert verify_checkpoint(list_checkpoints(run / "checkpoints")[-1]) == []
