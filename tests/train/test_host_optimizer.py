"""A run whose optimizer works on the host during the backward pass saves what a run on the device saves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write import snapshot
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun
from tests.tiny import make_run

STEPS = 6


def saved(folder: Path, hooks: list[Hook], **settings: Any) -> list[State]:
    """The checkpoints of every step of a run without clipping."""
    run = make_run(
        folder,
        train__steps=STEPS,
        train__clip_norm=0.0,
        parallel__bucket_bytes=1024,
        checkpoint__save_every_steps=1,
        checkpoint__keep_last=STEPS,
        **settings,
    )
    train(run, hooks=hooks)
    return [load(path) for path in list_checkpoints(run / "checkpoints")]


def assert_same(left: list[State], right: list[State]) -> None:
    assert len(left) == len(right) == STEPS
    for mine, theirs in zip(left, right, strict=True):
        for kind in ("model", "optimizer"):
            found, expected = getattr(mine, kind), getattr(theirs, kind)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_no_update_begins_before_the_last_step_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies for checkpoints are late: an update that did not wait for them would be part of the step before it."""
    there = saved(tmp_path / "device", [])
    copy = snapshot._copy

    def late(pairs: Any) -> None:
        time.sleep(0.2)
        copy(pairs)

    monkeypatch.setattr(snapshot, "_copy", late)
    assert_same(saved(tmp_path / "host", [], parallel__offload=("optimizer",)), there)


class Larger(Hook):
    """Changes a gradient."""

    def on_gradients(self, run: TrainingRun, gradients: Any) -> None:
        gradients["norm.weight"].mul_(2 + run.step)


def test_a_hook_on_gradients_has_its_say(tmp_path: Path) -> None:
    there = saved(tmp_path / "device", [Larger()])
    here = saved(tmp_path / "host", [Larger()], parallel__offload=("optimizer",))
    assert_same(here, there)
