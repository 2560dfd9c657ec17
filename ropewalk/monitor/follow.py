"""The true curve of a run, while it goes on or afterwards: without what restarts and rollbacks undid, and with the last
values of steps that were done twice.

`Curve` reads `events.jsonl` as it grows; `Feed` keeps trackers equal to it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ropewalk.base.events import Event, events_path, parse_event

from .figures import FIGURES
from .stream import CurveTrack, Stream
from .values import number

QUIET_S = 60.0
"""A run whose lock nobody holds here, and whose last event is younger, may go on at another machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """What was measured at one moment of a step: figures of training, or of a validation after it."""

    step: int
    time: float
    """Seconds since 1970."""
    figures: Mapping[str, float]
    """By their names in figures.py; what was not measured is left out."""


class Tracker(Protocol):
    """Keeps a curve for another tool. Points come in order of their steps; two may have the same step."""

    def resume(self, points: Iterator[Point]) -> int:
        """How many of the first `points` are written already, by an earlier tracker; drops everything else that is."""

    def drop(self, step: int) -> None:
        """Removes the points of `step` and later ones: they are not what came of the run."""

    def write(self, points: Iterator[Point]) -> None:
        """Adds points behind those that are there."""

    def close(self) -> None:
        """Makes everything durable. Nothing is called afterwards."""


class Curve:
    """The points of a run that count, by step."""

    def __init__(self, run: Path) -> None:
        self._path = events_path(run)
        self._track = CurveTrack()
        self.stream = Stream(self._path, curve=self._track)
        """Everything else that the events say."""

    def __len__(self) -> int:
        return len(self._track.offsets)

    def update(self) -> None:
        """Reads what was appended."""
        self.stream.update()

    def take_changed(self) -> int:
        """How many points from the first one are as they were at the last call."""
        changed, self._track.changed = self._track.changed, len(self)
        return changed

    def start_of_step(self, place: int) -> tuple[int, int]:
        """The step of the point at `place`, and the place of its first point."""
        step = self._track.step_at(place)
        return step, bisect_left(self._track.steps, self._track.first_key(step))

    def points(self, first: int = 0) -> Iterator[Point]:
        """Those from place `first` on."""
        if first >= len(self):
            return
        with open(self._path, "rb") as file:
            for offset in self._track.offsets[first:]:
                file.seek(offset)
                event = parse_event(file.readline())
                if event is not None:  # else it was damaged since
                    yield _point(event)


class Feed:
    """Keeps trackers equal to the curve of a run."""

    def __init__(self, curve: Curve, trackers: Sequence[Tracker]) -> None:
        self._curve, self._trackers = curve, trackers
        self._written = [tracker.resume(curve.points()) for tracker in trackers]
        curve.take_changed()
        self._write()

    def update(self) -> None:
        """Gives the trackers what the curve has learned."""
        same = self._curve.take_changed()
        for index, tracker in enumerate(self._trackers):
            if same < self._written[index]:
                # The last step that stays is written anew: of those that go only this is sure, that they follow it.
                step, place = self._curve.start_of_step(same - 1) if same else (0, 0)
                tracker.drop(step)
                self._written[index] = place
        self._write()

    def _write(self) -> None:
        for index, tracker in enumerate(self._trackers):
            if self._written[index] < len(self._curve):
                tracker.write(self._curve.points(self._written[index]))
                self._written[index] = len(self._curve)


def is_over(stream: Stream, *, held: bool, waits: bool = False) -> bool:
    """Whether nobody works on the run any more; `held` says whether somebody held its lock before `stream` was read.
    With `waits` a run that was stopped before its end is not over: somebody may continue it."""
    last = stream.others[-1]["kind"] if stream.others else ""
    if held:
        return False
    if last in ("run_finished", "stage_finished", "stage_skipped", "train_finished"):
        return True
    return not waits and not time.time() - stream.last_time < QUIET_S


def _point(event: Event) -> Point:
    kind = event["kind"]
    found = ((figure.name, number(event.get(figure.field))) for figure in FIGURES if figure.kind == kind)
    figures = {name: value for name, value in found if value is not None}
    return Point(step=event["step"], time=float(event["time"]), figures=figures)
