"""Copies for other machines keep out of the way of the collectives of a step: measured by the clock of a real run."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ropewalk.checkpoint.tiers.wire import Wire
from ropewalk.train import loop
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.settings import read_settings
from ropewalk.train.training_run import TrainingRun
from tests.parallel.pool import POOL
from tests.parallel.ranked import as_rank
from tests.tiny import make_run

pytestmark = pytest.mark.xdist_group("pool")

RANKS = 4
Spans = list[tuple[float, float]]
Slices = list[tuple[float, float, int]]
"""Begin, end and bytes."""


class Timed:
    """A gate that notes when each slice went: from when it may until the next is asked for, or all have gone."""

    def __init__(self, gate: Any, slices: Slices) -> None:
        self._gate, self._slices, self._began, self._size = gate, slices, 0.0, 0

    @property
    def slice_bytes(self) -> int:
        return int(self._gate.slice_bytes)

    def wait(self, size: int) -> None:
        self.ended()
        self._gate.wait(size)
        self._began, self._size = time.perf_counter(), size

    def ended(self) -> None:
        if self._began:
            self._slices.append((self._began, time.perf_counter(), self._size))
            self._began = 0.0


class Noted(Hook):
    """Notes collectives, and all steps; without `marks` copies do not see them."""

    def __init__(self, collectives: Spans, *, marks: bool) -> None:
        self._collectives, self._marks = collectives, marks

    def before_training(self, run: TrainingRun) -> None:
        assert run.checkpointer._tier_writer is not None
        self.learner, traffic, control = run.checkpointer._tier_writer.learner, run.mesh.traffic, run.mesh.control.name
        if not self._marks:
            traffic.observers.clear()
            traffic.on_begin.clear()
        traffic.observers.append(lambda it: it.group != control and self._collectives.append((it.begin, it.end)))
        self.learner._steps = type(self.learner._steps)(maxlen=10_000)


def timed(rank: int, run: Path, peers: tuple[str, ...], marks: bool) -> tuple[Spans, Spans, Slices]:
    """Trains as one of four machines; the spans of its steps, of its collectives and of the slices it sent."""
    slices: Slices = []
    collectives: Spans = []
    real = Wire.send_file

    def send_file(self: Wire, header: Any, file: Any, begin: int, end: int, gate: Any = None) -> None:
        noting = Timed(gate, slices)
        real(self, header, file, begin, end, noting)
        noting.ended()

    with as_rank(rank, RANKS) as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        patch.setattr(Wire, "send_file", send_file)
        settings = read_settings(run)
        tiers = dataclasses.replace(settings.checkpoint.tiers, peers=peers, folder=str(run.parent / f"shm-{rank}"))
        Path(tiers.folder).mkdir()
        settings = dataclasses.replace(settings, checkpoint=dataclasses.replace(settings.checkpoint, tiers=tiers))
        patch.setattr(loop, "read_settings", lambda _: settings)
        noted = Noted(collectives, marks=marks)
        train(run, hooks=[noted], stays=True)
        steps = [(step.begin, step.end) for step in noted.learner._steps]
    # What was on its way at the end of the last step had the network for itself.
    return steps, collectives, [each for each in slices if each[1] < steps[-1][1]]


def overlap(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """Seconds of `spans` that lie in one of `others`."""
    joined: Spans = []
    for begin, end in sorted(others):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return sum(max(0.0, min(end, last) - max(begin, first)) for begin, end in spans for first, last in joined)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def measured(folder: Path, *, marks: bool) -> dict[str, float]:
    folder.mkdir()
    secret = folder / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    run = make_run(
        folder,
        parallel__shard=RANKS,
        plan__microbatch_size=2,
        model__width=192,
        model__mlp_width=512,
        model__layers=4,
        load__sequence_length=64,
        train__batch_size=8,
        train__steps=60,
        train__validate_every_steps=1000,
        checkpoint__save_every_steps=1000,
        checkpoint__tiers__memory="on",
        checkpoint__tiers__memory_every_steps=4,
        checkpoint__tiers__secret_file=str(secret),
        checkpoint__tiers__run="measured",
    )
    peers = tuple(f"127.0.0.1:{port}" for port in free_ports(RANKS))
    found = POOL.run(timed, run, peers, marks, world=RANKS, timeout_s=400)
    figures = {"bytes": 0.0, "beside": 0.0, "busy_s": 0.0, "steps_s": 0.0, "slices": 0.0}
    for steps, collectives, slices in found:
        for begin, end, size in slices:
            figures["bytes"] += size
            figures["beside"] += size * overlap([(begin, end)], collectives) / (end - begin)
        figures["busy_s"] += overlap(steps, collectives)
        figures["steps_s"] += sum(end - begin for begin, end in steps)
        figures["slices"] += len(slices)
    return figures


@pytest.mark.slow
def test_marks_take_nine_tenths_of_the_copies_out_of_the_way_of_collectives(tmp_path: Path) -> None:
    """Bytes that a rank sends while one of its own collectives is in flight, by the clock: those of a slice are spread
    evenly over its time. The first copies of a run go before there is a profile, and count as well."""
    shares = {}
    for name, marks in (("without", False), ("with", True)):
        found = measured(tmp_path / name, marks=marks)
        shares[name] = found["beside"] / found["bytes"]
        beside, sent = found["beside"] / 1e6, found["bytes"] / 1e6
        print(
            f"{name} marks: {beside:.1f} of {sent:.1f} MB ({shares[name]:.1%}) sent beside collectives, "
            f"{found['slices']:.0f} slices; collectives take {found['busy_s'] / found['steps_s']:.1%} of the steps"
        )
        assert found["slices"] > 100
    assert shares["with"] <= shares["without"] / 10
