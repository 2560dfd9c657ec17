"""Every optimizer, precision and schedule: the loss falls, and a stop in the middle changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.base.events import read_events
from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest
from ropewalk.train import loop
from ropewalk.train.hooks import Hook
from ropewalk.train.loop import train
from tests.tiny import make_run

STEPS = 30
# Adafactor has no momentum and LAMB's steps are in proportion to the weights: both want their own rate.
OPTIMIZERS = {"adamw": 1e-2, "adafactor": 2e-2, "lamb": 5e-2, "muon": 1e-2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {},
    "linear": {},
    "step": {"milestones": (0.5, 1.0), "milestone_unit": "epochs"},
    "wsd": {},
    "constant": {},
    # No validation gains a hundred nats: the rate falls at every second one.
    "adaptive": {"patience": 2, "min_gain": 100.0, "factor": 0.7, "final_share": 0.2},
}
CHOICES: dict[str, dict[str, Any]] = {
    **{
        f"{kind} {precision}": {
            "optimizer__kind": kind,
            "schedule__peak_lr": rate,
            "precision": precision,
        }
        for kind, rate in OPTIMIZERS.items()
        for precision in ("fp32", "bf16-pure")
    },
    "adamw bf16": {"precision": "bf16"},
    "adamw fp16": {"precision": "fp16"},
    "muon fp16": {"precision": "fp16", "optimizer__kind": "muon"},
    **{
        shape: {"schedule__shape": shape, **{f"schedule__{key}": value for key, value in settings.items()}}
        for shape, settings in SCHEDULES.items()
    },
}


class Stop(Exception):
    """What a test stops a run with."""


class StopAfter(Hook):
    def after_step(self, step: int) -> None:
        if step == 17:
            raise Stop


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(loop, "peak_flops", lambda *_: 1e11)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, made once."""
    folder = tmp_path_factory.mktemp("corpus")
    make_run(folder)
    return folder / "prepared"


def make(folder: Path, prepared: Path, choice: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "prepared").symlink_to(prepared)
    settings = {"steps": STEPS, "validate_every_steps": 3, "log_every_steps": 5, **choice}
    overrides = {f"train__{key}": value for key, value in settings.items()}
    return make_run(folder, checkpoint__save_every_steps=7, **overrides)


def last(run: Path) -> Path:
    return list_checkpoints(run / "checkpoints")[-1]


def rates(run: Path) -> list[float]:
    return [event["lr"] for event in read_events(run / "events.jsonl") if event["kind"] == "step"]


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_it_learns_and_goes_on_after_a_stop_with_the_same_bits(
    tmp_path: Path, prepared: Path, choice: dict[str, Any]
) -> None:
    straight, stopped = (make(tmp_path / name, prepared, choice) for name in ("straight", "stopped"))
    train(straight)
    losses = [event["loss"] for event in read_events(straight / "events.jsonl") if event["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5
    with pytest.raises(Stop):
        train(stopped, hooks=[StopAfter()])
    train(stopped)
    assert {f.name: f.read_bytes() for f in last(straight).iterdir()} == {
        f.name: f.read_bytes() for f in last(stopped).iterdir()
    }
    assert rates(straight) == rates(stopped)[:3] + rates(stopped)[-3:]


def test_an_adaptive_rate_falls_and_its_state_is_in_the_checkpoint(tmp_path: Path, prepared: Path) -> None:
    run = make(tmp_path / "here", prepared, CHOICES["adaptive"])
    train(run)
    # Ten validations, the first sets the best: falls with the 3rd, 5th, 7th and 9th, after steps 9, 15, 21 and 27.
    assert rates(run) == pytest.approx([1e-2 * 0.7**falls for falls in (0, 1, 1, 2, 3, 4)])
    schedule = read_checkpoint_manifest(last(run)).schedule
    assert (schedule["share"], schedule["waited"]) == (pytest.approx(0.7**4), 1)


def test_an_overflow_in_fp16_is_told_with_the_scale(tmp_path: Path, prepared: Path, monkeypatch: Any) -> None:
    from ropewalk.parallel import executor
    from ropewalk.parallel.precision import LossScale

    monkeypatch.setattr(executor, "LossScale", lambda device: LossScale(device, start=2.0**32))
    run = make(tmp_path / "here", prepared, CHOICES["adamw fp16"])
    train(run)
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    warnings = [event["message"] for event in read_events(run / "events.jsonl") if event["kind"] == "warning"]
    assert steps[0]["skipped"] == 5
    assert steps[0]["loss_scale"] == 2.0**28
    assert warnings[0].startswith("step 5: 5 updates skipped since the last line: gradient not finite, loss scale 2.6")
    assert steps[-1]["skipped"] == 0
    assert steps[-1]["loss"] < steps[0]["loss"]
