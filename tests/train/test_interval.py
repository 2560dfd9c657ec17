"""`checkpoint.save_every = "auto"` in a run: what it measures and learns decides when the run saves."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import Preempted
from ropewalk.base.events import Event
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.disk import LocalDisk
from ropewalk.checkpoint.policy.frequency import LEARNED, read_learned
from ropewalk.parallel.executor import StepResult
from ropewalk.train.checkpointer import Checkpointer
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun
from tests.checkpoint.newest import continued
from tests.checkpoint.test_background import state
from tests.tiny import make_run
from tests.train.runs import events, final_files, quick, train_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def decisions(run: Path) -> list[Event]:
    return events(run, "save_interval")


def learned(run: Path) -> dict[str, Any]:
    found = read_learned(run / "checkpoints", warn=pytest.fail)
    assert found is not None
    return found


def auto(**settings: Any) -> Checkpoints:
    return Checkpoints(save_every="auto", **settings)


def test_a_run_saves_early_and_then_as_often_as_its_measurements_say(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__steps=40, checkpoint=auto(max_overhead=0.9))
    train(run)
    saved = [event["step"] for event in events(run, "saved")]
    assert (saved[0], saved[-1]) == (10, 40)
    decided = decisions(run)
    assert decided, "what saves cost never reached the decision"
    assert all(event["bound"] in ("overhead", "persist") for event in decided)
    assert all(event["step_s"] > 0 and event["blocked_s"] > 0 for event in decided)
    for event, following in zip(decided, [*decided[1:], None], strict=True):
        # No save comes sooner than decided, as long as that holds; the last step is always saved.
        until = following["step"] if following else 40
        steps = [step for step in saved if event["step"] < step <= until and step < 40]
        assert all(after - before >= event["steps"] for before, after in itertools.pairwise(steps))
    assert (learned(run)["alive"], learned(run)["failures"]) == (False, 0)


def test_kills_are_failures_that_the_run_learns_from(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__steps=20, checkpoint=auto(max_overhead=1e-6))
    for number, step in enumerate((3, 12)):
        train_until(run, step)
        assert (learned(run)["alive"], learned(run)["failures"]) == (True, number)
    train(run)
    last = decisions(run)[-1]
    # Of 50,000 hours no trace is left: two failures in some seconds.
    assert (last["failures"], last["bound"]) == (2, "failures")
    assert last["mtbf_s"] < 3600
    assert learned(run)["alive"] is False


class Signalled(Hook):
    """The scheduler asks for room, or a user presses Ctrl-C, after a step."""

    def __init__(self, step: int, number: int) -> None:
        self._step, self._number = step, number

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if run.step == self._step:
            os.kill(os.getpid(), self._number)


def test_who_was_asked_to_stop_and_saved_did_not_fail(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__steps=9, checkpoint=auto())
    with pytest.raises(KeyboardInterrupt):
        train(run, hooks=[Signalled(2, signal.SIGINT)])
    assert learned(run)["alive"] is False
    with pytest.raises(Preempted):
        train(run, hooks=[Signalled(4, signal.SIGTERM)])
    assert (learned(run)["alive"], learned(run)["failures"]) == (False, 0)


def test_time_that_a_killed_run_lived_after_its_last_note_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__steps=9, checkpoint=auto())
    train_until(run, 2)
    before = learned(run)
    beat = run / "heartbeats" / "rank-00000.json"
    os.utime(beat, (before["time"] + 5000, before["time"] + 5000))
    train_until(run, 4)
    assert learned(run)["seconds"] == pytest.approx(before["seconds"] + 5000, rel=0.2)


def test_a_record_that_is_damaged_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__steps=4, checkpoint=auto())
    train_until(run, 2)
    path = run / "checkpoints" / LEARNED
    path.write_bytes(path.read_bytes()[:-9])
    train(run)
    assert any(LEARNED in event["message"] for event in events(run, "warning"))
    assert (learned(run)["alive"], learned(run)["failures"]) == (False, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Held(LocalDisk):
    """A disk that finishes nothing before it is told to."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def make_folder(self, path: Path) -> None:
        assert self.free.wait(60)
        super().make_folder(path)


def test_steps_beside_a_save_that_is_being_written_are_measured(tmp_path: Path) -> None:
    """On a clock of its own: steps of 1 s, and of 1.5 s while the disk writes, which is for three of them."""
    clock, disk = Clock(), Held()
    settings = auto(max_overhead=0.1, mtbf_hours=100.0)
    checkpointer = Checkpointer(tmp_path, settings, warn=pytest.fail, disk=disk, clock=clock)
    continued(checkpointer)

    def step(seconds: float) -> None:
        checkpointer.step_began()
        clock.now += seconds
        checkpointer.steps_settled()

    for number in range(1, 4):
        for _ in range(6):
            step(1.0)
        disk.free.clear()
        checkpointer.save(state(number), spent_s=0.25)
        for _ in range(3):
            step(1.5)
            assert checkpointer.finished() == []
        disk.free.set()
        checkpointer.settle()
        assert [saved.step for saved in checkpointer.finished()] == [number]
    decision = checkpointer.decide()
    assert decision is not None
    assert decision.slowed_s == pytest.approx(3 * 0.5, abs=0.2)  # less what the copy took by the real clock
    assert decision.blocked_s >= 0.25
    assert decision.step_s == 1.0
    assert decision.bound == "overhead"
    assert decision.interval_s == pytest.approx((decision.blocked_s + decision.slowed_s) / 0.1)
    assert decision.mtbf_s == pytest.approx(100 * 3600 + clock.now)
    checkpointer.close()


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_ends_with_the_same_bits_and_loses_little(tmp_path: Path) -> None:
    """Real processes and kill -9; what is lost each time is less than two intervals as they were decided by then."""
    settings = auto(max_overhead=0.1)
    lengths = {"train__steps": 600, "train__log_every_steps": 1, "train__validate_every_steps": 1000}
    straight = make_run(tmp_path / "straight", checkpoint=settings, **lengths)
    train(straight)
    run = make_run(tmp_path / "killed", checkpoint=settings, **lengths)
    draw = random.Random(10)
    lost, least = [], 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for _ in range(10):
        least += draw.randint(20, 60)
        process = subprocess.Popen([sys.executable, "-m", "ropewalk.train", str(run)], env=environment)
        try:
            while _last_step(run) < least:
                assert process.poll() is None, "it ended by itself"
                time.sleep(0.02)
        finally:
            process.kill()
            process.wait()
        lost.append((_last_step(run), decisions(run)[-1]["steps"] if decisions(run) else 10))
    train(run)
    restored = [event["step"] for event in events(run, "restored")]
    assert len(restored) == 10
    losses = [reached - step for (reached, _), step in zip(lost, restored, strict=True)]
    print(f"steps lost {losses}, intervals {[interval for _, interval in lost]}")
    last = decisions(run)[-1]
    print({name: last[name] for name in ("bound", "steps", "mtbf_s", "failures", "blocked_s", "slowed_s")})
    assert learned(run)["failures"] == 10
    assert last["failures"] == 10
    assert last["mtbf_s"] < 3600
    # The interval may have been longer before the last decision; a save that is not durable yet counts as none.
    longest = max(10, *(event["steps"] for event in decisions(run)))
    assert all(each <= 2 * longest + 2 for each in losses)
    assert sum(losses) < 600 / 2
    assert final_files(run)["model.safetensors"] == final_files(straight)["model.safetensors"]
    assert final_files(run)["optimizer.safetensors"] == final_files(straight)["optimizer.safetensors"]


def _last_step(run: Path) -> int:
    return max((event["step"] for event in events(run, "step")), default=0) if (run / "events.jsonl").exists() else 0
