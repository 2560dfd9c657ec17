"""A run tells how much of its kernels was measured, and how long it will take, which bounds that."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.parallel.kernels.matmul_tuning import Tuning
from ropewalk.train import active_phase as phase
from ropewalk.train.loop import train
from ropewalk.train.measure import ceilings
from ropewalk.train.measure.ceilings import EXPECTED_MFU, expected_seconds
from tests.heard import Heard
from tests.tiny import make_run
from tests.train.runs import events
from tests.train.test_training import documented_fields

DONE = Tuning(known=1, measured=2, left_out=3, seconds=0.5, budget_s=0.5)


def test_matmuls_that_were_left_out_are_told_and_the_length_of_the_run_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, seconds = phase.apply, []

    def tuned(*arguments: Any, hooks: Any, run_s: float, **settings: Any) -> Any:
        seconds.append(run_s)
        for callback in hooks.after_tuning:
            callback(DONE)
        return apply(*arguments, hooks=hooks, run_s=run_s, **settings)

    monkeypatch.setattr(phase, "apply", tuned)
    monkeypatch.setattr(phase, "expected_seconds", lambda flops, *_, **__: flops / 7)
    run, heard = make_run(tmp_path, train__steps=2), Heard()
    train(run, progress=heard)
    (event,) = events(run, "tuned")
    assert set(event) - {"format", "time", "rank", "kind"} == documented_fields()["tuned"]
    assert event.items() >= dataclasses.asdict(DONE).items()
    assert ("say", DONE.reason()) in heard.calls
    (started,) = events(run, "train_started")
    assert 0 < seconds[0] <= started["flops_per_token"] * 2 * 4 * 16 / 7


def test_a_run_takes_its_flops_at_half_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    seconds = functools.partial(expected_seconds, device=torch.device("cuda"), precision="bf16")
    assert seconds(989e12 * 60, ranks=4) == pytest.approx(60 / 4 / EXPECTED_MFU)
    assert seconds(1.0, ranks=1, device=torch.device("cpu")) == math.inf
    monkeypatch.setattr(ceilings, "DENSE_BF16", {})
    assert seconds(1.0, ranks=1) == math.inf
