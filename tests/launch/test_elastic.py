"""A run by several processes ends with the same bits when some of them are killed on the way.

Whole runs are slow; test_team.py has the same laws for workers that only add up numbers.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.base.events import events_path, read_events
from tests.flow.tiny import write_tiny

from .elastic import SETTINGS, train, trained_identity

BIN = Path(sys.executable).parent


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    undisturbed = train(tmp_path / "a", "--nproc", "2", "--json")
    assert undisturbed.status == 0, undisturbed.err
    disturbed = train(tmp_path / "b", "--nproc", "2", "--json", kills=[(1, 5)])
    assert disturbed.status == 0, disturbed.err
    assert "a worker ended; all of them start again (1)" in disturbed.err
    assert json.loads(disturbed.out) == json.loads(undisturbed.out)
    assert trained_identity(tmp_path / "b") == trained_identity(tmp_path / "a")
    starts = [event for event in read_events(events_path(tmp_path / "b" / "runs" / "tiny"))]
    assert [event["step"] for event in starts if event["kind"] == "train_started"] in ([0, 4], [0, 2])


@pytest.mark.slow
def test_ten_workers_killed_at_random_steps_change_nothing(tmp_path: Path) -> None:
    draw = random.Random(7)
    kills = [(draw.randrange(4), step) for step in sorted(draw.sample(range(1, 40), 10))]
    settings = ("--nproc", "4", "train.steps=40", "train.faults.max_restarts=10")
    assert train(tmp_path / "a", *settings).status == 0
    disturbed = train(tmp_path / "b", *settings, kills=kills, timeout_s=900)
    assert disturbed.status == 0, disturbed.err
    assert list((tmp_path / "b" / "kills").iterdir()) == []
    assert trained_identity(tmp_path / "b") == trained_identity(tmp_path / "a")


def test_what_cannot_be_trained_is_said_once_and_not_tried_again(tmp_path: Path) -> None:
    ended = train(tmp_path, "--nproc", "3")
    assert ended.status == 2
    assert ended.err.count("3 ranks cannot share") == 1
    assert "Traceback" not in ended.err


LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2", "--no-python"],
    "mpirun": [str(BIN / "mpirun"), "--oversubscribe", "-n", "2"],
}


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_processes_of_a_launcher_prepare_once_and_train_to_the_loss_of_one(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not shutil.which(LAUNCHERS[launcher][0]):
        pytest.skip(f"needs {launcher}")
    together = train(tmp_path / "a", "--json", before=LAUNCHERS[launcher])
    assert together.status == 0, together.err
    write_tiny(tmp_path / "b")
    monkeypatch.chdir(tmp_path / "b")
    alone = flow.train("tiny.toml", SETTINGS)
    # Two halves of a batch are added in another order than its rows: some roundings of 6e-8 over six steps.
    # On the terminal that mpirun gives ranks, packages such as colorama switch colours off at exit, in another line.
    assert json.loads(together.out.splitlines()[0]) == pytest.approx(alone, rel=1e-5)
    assert len(re.findall("kept 40 of 40 documents", together.err)) == 1
