"""A process that no longer gets on says where it stands and ends; a rank that is slower than the others is named."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.train.config import Faults
from ropewalk.train.hooks.watchdog import HANG, Watchdog, heartbeat_path, stragglers
from ropewalk.train.loop import train
from tests.tiny import make_run
from tests.train.runs import events, quick

ROOT = Path(__file__).parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def dog(run: Path, clock: Clock, **settings: float) -> Watchdog:
    return Watchdog(run, Faults(**settings), clock=clock)


def test_nothing_hangs_before_the_first_step_nor_within_the_limit(tmp_path: Path) -> None:
    clock = Clock()
    watchdog = dog(tmp_path, clock, hang_s=300)
    clock.now += 1e6
    assert not watchdog.is_hanging()
    watchdog.beat(1)
    clock.now += 299
    assert not watchdog.is_hanging()
    clock.now += 2
    assert watchdog.is_hanging()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=50), st.floats(1, 500), st.floats(1, 40))
def test_the_limit_is_the_larger_of_the_seconds_and_the_median_steps(
    steps: list[float], least: float, factor: float
) -> None:
    clock = Clock()
    watchdog = dog(Path("/nonexistent"), clock, hang_s=least, hang_steps=factor)
    watchdog.beat(0)
    for number, seconds in enumerate(steps):
        clock.now += seconds
        watchdog.beat(number + 1)
    assert watchdog.limit_s == pytest.approx(max(least, factor * statistics.median(steps)), rel=1e-6)


def test_a_pause_may_last_and_the_step_after_it_may_not(tmp_path: Path) -> None:
    clock = Clock()
    watchdog = dog(tmp_path, clock, hang_s=10)
    watchdog.beat(1)
    with watchdog.paused():
        clock.now += 1000
        assert not watchdog.is_hanging()
    assert not watchdog.is_hanging()
    clock.now += 11
    assert watchdog.is_hanging()


def test_time_in_which_the_whole_process_stood_still_does_not_count(tmp_path: Path) -> None:
    clock = Clock()
    watchdog = dog(tmp_path, clock, hang_s=10)
    watchdog.forgive(5)  # nothing to forgive before the first step
    watchdog.beat(1)
    clock.now += 1000
    watchdog.forgive(995)
    assert not watchdog.is_hanging()
    clock.now += 6
    assert watchdog.is_hanging()


def test_a_run_leaves_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    run = make_run(tmp_path)
    train(run)
    told = json.loads(heartbeat_path(run, 0).read_text())
    assert told["rank"] == 0
    assert told["step"] >= 1
    assert time.time() - told["time"] < 60


HANGS = """
import math, sys, time
from pathlib import Path
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.hooks.watchdog import Watchdog

hangs = False
limit = Watchdog.limit_s.fget
# However slow this machine is, no step before is taken for a hang.
Watchdog.limit_s = property(lambda watchdog: limit(watchdog) if hangs else math.inf)

class Hangs(Hook):
    def after_step(self, run, result):
        global hangs
        if run.step == 5:
            hangs = True
            wait_for_a_rank_that_is_gone()

def wait_for_a_rank_that_is_gone():
    time.sleep(300)

train(Path(sys.argv[1]), hooks=[Hangs()])
"""


def test_a_hang_ends_with_its_own_status_and_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, train__faults=Faults(hang_s=0.5, hang_steps=1.0))
    command = [sys.executable, "-c", HANGS, str(run)]
    done = subprocess.run(command, cwd=ROOT, timeout=200, capture_output=True, text=True)
    assert done.returncode == HANG, done.stderr
    (event,) = events(run, "hang")
    assert event["step"] == 6
    assert event["limit_s"] < 60
    assert "wait_for_a_rank_that_is_gone" in (run / event["stacks"]).read_text()
    monkeypatch.setattr(Watchdog, "limit_s", math.inf)
    train(run)  # the same command continues
    assert events(run, "train_finished")


def test_a_slow_rank_is_named_and_ordinary_noise_is_not() -> None:
    draw = random.Random(3)
    paces = {rank: draw.gauss(1.0, 0.02) for rank in range(64)}
    assert stragglers(paces) == {}
    assert list(stragglers(paces | {17: 1.4, 40: 1.5})) == [17, 40]
    assert stragglers({0: 1.0, 1: 9.0}) == {}  # two ranks cannot tell which of them is slow


def test_ranks_that_differ_by_next_to_nothing_are_not_named() -> None:
    assert stragglers({rank: 1.0 for rank in range(8)} | {3: 1.01}) == {}
    assert list(stragglers({rank: 1.0 for rank in range(8)} | {3: 1.2})) == [3]


@given(st.dictionaries(st.integers(0, 40), st.floats(0.1, 10), min_size=3), st.floats(0.5, 100))
def test_units_of_time_do_not_matter(paces: dict[int, float], unit: float) -> None:
    scaled = {rank: value * unit for rank, value in paces.items()}
    first, second = stragglers(paces), stragglers(scaled)
    near = {rank for rank, z in (first | second).items() if abs(z - 4) < 1e-6}
    assert first.keys() - near == second.keys() - near


def test_a_heartbeat_is_whole_at_every_moment(tmp_path: Path) -> None:
    clock = Clock()
    watchdog = dog(tmp_path, clock)
    for step in range(5):
        clock.now += 2
        watchdog.beat(step)
        assert json.loads(heartbeat_path(tmp_path, 0).read_text())["step"] == step
    assert [path.name for path in (tmp_path / "heartbeats").iterdir()] == ["rank-00000.json"]
