"""Reads the true curve of a run, live or finished: without steps undone by restarts and rollbacks, and with the last
values of repeated steps.

`LiveCurve` reads `events.jsonl` as it grows; `Feed` keeps trackers equal to it.
"""

from __future__ import annotations

import difflib
import importlib
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ropewalk.base.errors import UserError
from ropewalk.base.events import Event, events_path, parse_event
from ropewalk.base.metric import read_tasks

from .stream import CurveTrack, EventStream
from .values import number

QUIET_S = 60.0
"""An unlocked run with a more recent event may still be running on another machine."""


@dataclass(frozen=True, slots=True)
class CurveField:
    """A field of one kind of event (docs/formats.md) and its names in trackers."""

    kind: str
    field: str
    name: str
    """With a folder, by which TensorBoard groups its charts."""
    column: str
    """Column name in CSV files."""


CURVE_FIELDS = (
    CurveField("step", "loss", "train/loss", "loss"),
    CurveField("step", "lr", "train/learning_rate", "lr"),
    CurveField("step", "grad_norm", "train/grad_norm", "grad_norm"),
    CurveField("step", "tokens", "train/tokens", "tokens"),
    CurveField("step", "skipped", "train/skipped_updates", "skipped"),
    CurveField("step", "loss_scale", "train/loss_scale", "loss_scale"),
    CurveField("step", "tokens_per_s", "speed/tokens_per_s", "tokens_per_s"),
    CurveField("step", "flops_per_s", "speed/flops_per_s", "flops_per_s"),
    CurveField("step", "mfu", "speed/mfu", "mfu"),
    CurveField("step", "step_s", "speed/step_s", "step_s"),
    CurveField("step", "data_wait_s", "speed/data_wait_s", "data_wait_s"),
    CurveField("step", "importance_hit_rate", "speed/importance_hit_rate", "importance_hit_rate"),
    CurveField("step", "memory_bytes", "speed/memory_bytes", "memory_bytes"),
    CurveField("validation", "loss", "validation/loss", "validation_loss"),
    CurveField("validation", "bits_per_byte", "validation/bits_per_byte", "validation_bits_per_byte"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The values of one event: of a training step, or of a validation or evaluation after it."""

    step: int
    time: float
    """Seconds since 1970."""
    figures: Mapping[str, float]
    """By their names in `CURVE_FIELDS`, of an evaluation by `evaluation/TASK/METRIC`; values that were not measured are
    absent."""


class Tracker(Protocol):
    """Writes a curve for another tool. Points come in order of their steps; two may have the same step."""

    def resume(self, points: Iterator[Point]) -> int:
        """Number of leading `points` that an earlier tracker has already written; drops everything else in the file."""

    def drop(self, step: int) -> None:
        """Removes the points of `step` and later ones, which the run has undone."""

    def write(self, points: Iterator[Point]) -> None:
        """Appends points."""

    def close(self) -> None:
        """Makes everything durable. Nothing is called afterwards."""


TRACKERS = {
    "csv": "ropewalk.monitor.trackers.csv_file:CsvTracker",
    "tensorboard": "ropewalk.monitor.trackers.tensorboard:TensorBoardTracker",
}
"""Trackers by their name on the command line: each is called with a path and the name of the run."""


def open_tracker(words: str, *, run: str) -> Tracker:
    """The tracker that `KIND=PLACE` names, for the run of this name."""
    kind, _, place = words.partition("=")
    if kind not in TRACKERS:
        near = difflib.get_close_matches(kind, TRACKERS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(TRACKERS)}"
        raise UserError(f"--to {words}: no tracker `{kind}`; {hint}")
    if not place:
        raise UserError(f"--to {words}: no path; write --to {kind}=PATH")
    module, _, name = TRACKERS[kind].partition(":")
    opener: Callable[[Path, str], Tracker] = getattr(importlib.import_module(module), name)
    return opener(Path(place), run)


class LiveCurve:
    """The points of a run by step, without those that it has undone."""

    def __init__(self, run: Path) -> None:
        self._path = events_path(run)
        self._track = CurveTrack()
        self.stream = EventStream(self._path, curve=self._track)
        """All other events."""

    def __len__(self) -> int:
        return len(self._track.offsets)

    def update(self) -> None:
        """Reads appended events."""
        self.stream.update()

    def take_changed(self) -> int:
        """Number of leading points that have not changed since the last call."""
        changed, self._track.changed = self._track.changed, len(self)
        return changed

    def start_of_step(self, place: int) -> tuple[int, int]:
        """The step of the point at index `place`, and the index of the first point of that step."""
        step = self._track.step_at(place)
        return step, bisect_left(self._track.steps, self._track.first_key(step))

    def points(self, first: int = 0) -> Iterator[Point]:
        """Points from index `first` on."""
        if first >= len(self):
            return
        with open(self._path, "rb") as file:
            for offset in self._track.offsets[first:]:
                file.seek(offset)
                event = parse_event(file.readline())
                if event is not None:  # damaged since it was recorded
                    yield _point(event)


class Feed:
    """Keeps trackers in sync with the curve of a run."""

    def __init__(self, curve: LiveCurve, trackers: Sequence[Tracker]) -> None:
        self._curve, self._trackers = curve, trackers
        self._written = [tracker.resume(curve.points()) for tracker in trackers]
        curve.take_changed()
        self._write()

    def update(self) -> None:
        """Sends new points to the trackers."""
        same = self._curve.take_changed()
        for index, tracker in enumerate(self._trackers):
            if same < self._written[index]:
                # Rewrites the last step that stays: the dropped points are only known to follow it.
                step, place = self._curve.start_of_step(same - 1) if same else (0, 0)
                tracker.drop(step)
                self._written[index] = place
        self._write()

    def _write(self) -> None:
        for index, tracker in enumerate(self._trackers):
            if self._written[index] < len(self._curve):
                tracker.write(self._curve.points(self._written[index]))
                self._written[index] = len(self._curve)


def is_over(stream: EventStream, *, held: bool, waits: bool = False) -> bool:
    """Whether the run has ended; `held`: its lock was held before `stream` was read. With `waits`, a run that was
    stopped before its end is not over, since it may continue."""
    last = stream.others[-1]["kind"] if stream.others else ""
    if held:
        return False
    if last in ("run_finished", "stage_finished", "stage_skipped", "train_finished"):
        return True
    return not waits and not time.time() - stream.last_time < QUIET_S


def _point(event: Event) -> Point:
    kind = event["kind"]
    if kind == "evaluation":
        named = {f"evaluation/{task}/{m.name}": m.value for task, metrics in read_tasks(event).items() for m in metrics}
        return Point(step=event["step"], time=float(event["time"]), figures=named)
    found = ((figure.name, number(event.get(figure.field))) for figure in CURVE_FIELDS if figure.kind == kind)
    figures = {name: value for name, value in found if value is not None}
    return Point(step=event["step"], time=float(event["time"]), figures=figures)
