"""What the tests of whole training runs share: runs that are stopped, what they leave, and runs in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ropewalk.base.events import Event, read_events
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.parallel.executor import StepResult
from ropewalk.train import active_phase as phase
from ropewalk.train import training_run
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun


class Stop(Exception):
    """What a test stops a run with."""


class StopAfter(Hook):
    """Raises Stop after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if run.step == self._step:
            raise Stop


def train_until(run: Path, step: int, *hooks: Hook) -> None:
    """Trains as a process that is killed after `step`."""
    with pytest.raises(Stop):
        train(run, hooks=[*hooks, StopAfter(step)])


def events(run: Path, kind: str | None = None) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if kind in (None, event["kind"])]


def last_checkpoint(run: Path) -> Path:
    return list_checkpoints(run / "checkpoints")[-1]


def final_files(run: Path) -> dict[str, bytes]:
    """The files of the newest checkpoint."""
    return {path.name: path.read_bytes() for path in last_checkpoint(run).iterdir()}


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and no measurement of the CPU's speed (0.3 s)."""
    torch.set_num_threads(1)
    monkeypatch.setattr(training_run, "peak_flops", lambda *_: 1e11)


def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs compute in float64: what differs then is not rounding."""
    empty = phase.empty
    monkeypatch.setattr(phase, "empty", lambda spec: empty(spec).double())
