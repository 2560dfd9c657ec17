"""Who waits for whom: stragglers are named though steps of all ranks take equally long, and copies of checkpoints are
told of every collective."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ropewalk.base.events import EventLog, events_path, read_events
from ropewalk.checkpoint.tiers.gap_scheduler import TransferGate
from ropewalk.parallel.comm import Group, Traffic
from ropewalk.parallel.executor import StepResult
from ropewalk.train.hooks import order
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.hooks.metrics import Meter, RankWatch
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.tiny import make_run
from tests.train.test_training import documented_fields

pytestmark = pytest.mark.xdist_group("pool")

SECONDS = (1.0, 1.1, 1.5, 0.9)
"""What each rank computes in a step; the third is 3.0 standard deviations (1.4826 x 0.1) above the median, 1.05."""
SLOW = 2
COLLECTIVES = ("all_reduce", "broadcast", "all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor")


class Arrivals:
    """A clock of this rank. A sum over ranks is there when the last of them has come: `all_reduce` of the ranks' times
    moves it to that moment when it is waited for."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    @contextmanager
    def moved_by_collectives(self) -> Iterator[None]:
        real = dist.all_reduce

        class Work:
            def __init__(self, work: Any, x: torch.Tensor, clock: Arrivals) -> None:
                self._work, self._x, self._clock = work, x, clock

            def wait(self) -> None:
                self._work.wait()
                self._clock.now = self._x.item()

        dist.all_reduce = lambda x, *a, **k: Work(real(x, *a, **k), x, self)
        try:
            yield
        finally:
            dist.all_reduce = real


def watched(rank: int, run: Path, sigma: float) -> float:
    """Two steps of a rank that computes for its `SECONDS`; seconds of a step."""
    clock, zero = Arrivals(), torch.zeros(())
    traffic = Traffic(clock=clock)
    group = Group("data", range(4), rank, dist.group.WORLD, traffic)
    meter = Meter(torch.device("cpu"), peak_flops=None, traffic=traffic, clock=clock)
    with EventLog(run, rank=rank) as events, clock.moved_by_collectives():
        watch = RankWatch(Group("control", range(4), rank, dist.group.WORLD), events=events, sigma=sigma)
        for step in (1, 2):
            clock.now += SECONDS[rank]
            group.all_reduce(torch.tensor(clock.now, dtype=torch.float64), operation="max")
            meter.add(StepResult(zero, zero, zero, zero.int()), tokens=1, flops=1)
            record = meter.read(step, tokens=step, lr=0.1)
            watch.look(record)
    return float(record["step_s"])


def test_the_rank_that_waits_least_is_the_straggler_though_all_steps_take_equally_long(tmp_path: Path) -> None:
    assert POOL.run(watched, tmp_path, 3.0, world=4) == [1.5] * 4
    events = list(read_events(events_path(tmp_path, rank=0)))
    ranks = [event for event in events if event["kind"] == "ranks"]
    assert [event["slowest_rank"] for event in ranks] == [SLOW, SLOW]
    assert ranks[0]["exposed_s"] == pytest.approx([0.5, 0.4, 0.0, 0.6])
    named = [event for event in events if event["kind"] == "straggler"]
    assert [(event["slow_rank"], event["busy_s"]) for event in named] == [(SLOW, 1.5)] * 2
    assert set(named[0]) - {"format", "time", "rank", "kind"} == documented_fields()["straggler"]


def test_the_deviation_that_makes_a_straggler_is_that_of_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    POOL.run(watched, tmp_path, 3.1, world=4)
    assert "straggler" not in {event["kind"] for event in read_events(events_path(tmp_path, rank=0))}
    sigmas, steps = [], []

    class Noting(RankWatch):
        def __init__(self, group: Group, *, events: EventLog, sigma: float) -> None:
            super().__init__(group, events=events, sigma=sigma)
            sigmas.append(sigma)

        def look(self, record: dict[str, Any]) -> None:
            steps.append(record["step"])

    monkeypatch.setattr(order, "RankWatch", Noting)
    train(make_run(tmp_path, train__faults__straggler_sigma=2.5, train__steps=4))
    assert (sigmas, steps) == ([2.5], [2, 4])


class Late(Hook):
    """Makes the other ranks wait for this one in every step."""

    def on_gradients(self, run: TrainingRun, gradients: Any) -> None:
        time.sleep(0.1)


class Reading(Hook):
    """Notes when batches were read."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_batch(self, run: TrainingRun, batch: Any) -> Any:
        self.moments.append(time.perf_counter())
        return batch


class Marks(Hook):
    """Notes every collective of training, and whether it is known to be in flight."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, Any, bool]] = []
        self._reals = {name: getattr(dist, name) for name in COLLECTIVES}

    def before_training(self, run: TrainingRun) -> None:
        assert run.checkpointer._tier_writer is not None
        self.learner, self.control = run.checkpointer._tier_writer.learner, run.mesh.control._handle
        for name, real in self._reals.items():
            setattr(dist, name, self._noting(real))

    def close(self) -> None:
        for name, real in self._reals.items():
            setattr(dist, name, real)

    def _noting(self, real: Any) -> Any:
        def call(*arguments: Any, **settings: Any) -> Any:
            self.calls.append((time.perf_counter(), settings.get("group"), bool(self.learner._in_flight)))
            return real(*arguments, **settings)

        return call


def marked(rank: int, run: Path) -> bool:
    """Trains; whether every collective of the first rank but those of hosts was marked, and a gate waits for it."""
    reading, marks = Reading(), Marks()
    with as_rank(rank, 2):
        train(run, hooks=[marks, reading, *([Late()] if rank else [])], stays=True)
        return rank > 0 or _kept_free(marks, reading.moments)


def _kept_free(marks: Marks, read: list[float]) -> bool:
    calls, learner, control = marks.calls, marks.learner, marks.control
    steps = list(learner._steps)
    # Each was known to be in flight when it was, and only then.
    assert all(in_flight for _, group, in_flight in calls if group is not control)
    assert not learner._in_flight
    of_steps = [at for at, group, _ in calls if group is not control and any(s.begin <= at < s.end for s in steps)]
    # Gradients and their norm, and the number of tokens.
    assert len(of_steps) >= 3 * len(steps) > 0
    windows = [(s.begin + begin, s.begin + end) for s in steps for begin, end in s.windows]
    assert all(any(begin <= at <= end for begin, end in windows) for at in of_steps)
    # So is the time in which data is read, which may come from the network.
    of_steps = [at for at in read if any(s.begin <= at < s.end for s in steps)]
    assert len(of_steps) == len(steps)
    assert all(any(begin <= at <= end for begin, end in windows) for at in of_steps)
    traffic, began = learner.traffic(), learner.began
    assert traffic is not None
    assert began is not None
    begin, end = max(traffic.busy, key=lambda window: window[1] - window[0])
    slept: list[float] = []
    TransferGate(slice_bytes=1, learner=learner, clock=lambda: began + (begin + end) / 2, sleep=slept.append).wait(1)
    return slept == [pytest.approx((end - begin) / 2, rel=1e-3)]


def test_copies_keep_out_of_the_way_of_every_collective_of_a_step(tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        parallel__replicate=2,
        plan__microbatch_size=1,
        train__steps=6,
        checkpoint__tiers__memory="on",
        checkpoint__tiers__folder=str(tmp_path / "shm"),
    )
    assert all(POOL.run(marked, run, world=2))
