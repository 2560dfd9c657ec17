"""Reads a run's events as a stream, so that a million steps take the memory of tens of thousands.

Nearly all events of a long run are steps. Lines in the form that `EventLog` writes are not parsed; only their step and
offset are recorded, which is enough to undo steps exactly after a restore. At the end of the file only the needed lines
are parsed: all of a short run, evenly spaced ones of a long run, always the last ones.

An update reads only appended lines.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ropewalk.base.events import UNDOING, Event, parse_event
from ropewalk.base.files import open_regular

from .values import finite, whole

MOST_STEPS = 20_000
"""Maximum number of parsed steps; a chart draws fewer points."""
MOST_LAYERS = 2_000
"""Maximum number of parsed events of layers and of evaluations; they are large."""
DENSE = 100
"""Number of last steps that are always parsed."""
MOST_NOTABLE = 5_000
"""Maximum number of notable events kept from the beginning, and as many from the end."""
TRACKED = {
    "step": MOST_STEPS,
    "validation": MOST_STEPS,
    "evaluation": MOST_LAYERS,
    "layers": MOST_LAYERS,
    "saved": 1,
    "save_interval": 1,
}
NOTABLE = (
    *("restored", "continued", "config_changed", "warning", "phase_started"),
    *("anomaly", "rolled_back", "stopped_early"),
)
"""Kinds of events that a report lists one by one."""

_HEAD = re.compile(rb'\{"format": [12], "time": (\d+(?:\.\d+)?), "rank": \d+, "kind": "step", "step": (\d+)[,}]')
_LOST = (b'"loss": "', b'"loss": NaN', b'"loss": Inf', b'"loss": -Inf')
"""How a non-finite loss is written."""


class Track:
    """Offsets of the events of one kind by step, without those that a restore undid."""

    def __init__(self) -> None:
        self.steps, self.offsets = array("q"), array("q")

    def add(self, step: int, offset: int) -> None:
        """Records an event; it replaces an earlier one of the same step."""
        if not self.steps or step > self.steps[-1]:
            self.steps.append(step)
            self.offsets.append(offset)
            return
        place = bisect_left(self.steps, step)
        if self.steps[place] == step:
            self.offsets[place] = offset
        else:
            self.steps.insert(place, step)
            self.offsets.insert(place, offset)

    def holds(self, step: int) -> bool:
        """Whether the step has an event."""
        place = bisect_left(self.steps, step)
        return place < len(self.steps) and self.steps[place] == step

    def undo(self, step: int) -> None:
        """Forgets the events after `step`, to which the run was restored."""
        place = bisect_right(self.steps, step)
        del self.steps[place:], self.offsets[place:]

    def chosen(self, most: int) -> list[int]:
        """Offsets of about `most` events at most, evenly spaced, and of all the last ones."""
        count = len(self.offsets)
        if count <= most:
            return list(self.offsets)
        stride, last = -(-count // most), max(0, count - min(DENSE, most))
        return [*(self.offsets[:last:stride] if most > 1 else ()), *self.offsets[last:]]


CURVE = ("step", "validation", "evaluation")
"""Kinds of events in the curve of a run, in the order in which a step writes them."""


class CurveTrack(Track):
    """Events of all kinds in `CURVE` by step and kind, without those that a restore undid."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = 0
        """Events before this index have not changed since it was last set."""

    def add_event(self, kind: str, step: int, offset: int) -> None:
        """Records an event; it replaces an earlier one of the same step."""
        key = self.first_key(step) + CURVE.index(kind)
        if not self.steps or key > self.steps[-1]:
            self.changed = min(self.changed, len(self.steps))
        else:
            self.changed = min(self.changed, bisect_left(self.steps, key))
        self.add(key, offset)

    def first_key(self, step: int) -> int:
        """The smallest key in `steps` of an event of `step`."""
        return len(CURVE) * step

    def step_at(self, place: int) -> int:
        """The step of an event."""
        return self.steps[place] // len(CURVE)

    def undo(self, step: int) -> None:
        super().undo(self.first_key(step + 1) - 1)
        self.changed = min(self.changed, len(self.steps))

    def clear(self) -> None:
        """Forgets everything: the file belongs to another run."""
        del self.steps[:], self.offsets[:]
        self.changed = 0


class EventStream:
    """The events of rank 0."""

    def __init__(self, path: Path | None, *, curve: CurveTrack | None = None) -> None:
        """Also keeps `curve` up to date."""
        self._path, self._curve = path, curve
        self._forget()
        self.update()

    def _forget(self) -> None:
        self.count = 0
        self.first_time = self.last_time = float("nan")
        self.others: list[Event] = []
        """Starts and ends of the run, of training and of run stages."""
        self._early: list[Event] = []
        self._late: deque[Event] = deque(maxlen=MOST_NOTABLE)
        self._tracks = {kind: Track() for kind in TRACKED}
        self._lost: dict[int, None] = {}
        self._parsed: dict[str, dict[int, Event | None]] = {kind: {} for kind in TRACKED}
        """Parsed events by kind and offset, None if unreadable."""
        self._read, self._file = 0, -1
        """Bytes read, and the inode of their file."""
        if self._curve is not None:
            self._curve.clear()

    def update(self) -> None:
        """Reads appended events; all events if the file was replaced. Leaves an unfinished line for the next update."""
        if self._path is None or not self._path.exists():
            return
        with open_regular(self._path) as file:
            now = os.fstat(file.fileno())
            if self._file != now.st_ino or now.st_size < self._read:
                self._forget()
                self._file = now.st_ino
            file.seek(self._read)
            self._scan(file)
            for kind, most in TRACKED.items():
                self._parsed[kind] = self._chosen(file, kind, most)

    def _chosen(self, file: IO[bytes], kind: str, most: int) -> dict[int, Event | None]:
        """Parses the events that are shown, each once."""
        known = self._parsed[kind]
        offsets = self._tracks[kind].chosen(most)
        return {each: known[each] if each in known else _at(file, each, kind) for each in offsets}

    def of(self, kind: str) -> list[Event]:
        """The parsed events of a tracked kind, by step."""
        return [event for event in self._parsed[kind].values() if event is not None]

    @property
    def logged(self) -> int:
        """Number of step events, parsed or not."""
        return len(self._tracks["step"].steps)

    @property
    def lost(self) -> tuple[int, ...]:
        """Steps with a non-finite loss."""
        return tuple(step for step in sorted(self._lost) if self._tracks["step"].holds(step))

    @property
    def notable(self) -> list[Event]:
        """Events of the kinds in `NOTABLE`; if there are very many, the first and the last ones."""
        return [*self._early, *self._late]

    def _scan(self, file: IO[bytes]) -> None:
        offset, add, lost = self._read, self._tracks["step"].add, self._lost
        last = b""  # time of the last line, if it was not parsed
        for line in file:
            if not line.endswith(b"\n"):
                break
            head = _HEAD.match(line)
            if head and line.endswith(b"}\n"):
                step = int(head[2])
                add(step, offset)
                if self._curve is not None:
                    self._curve.add_event("step", step, offset)
                if any(mark in line for mark in _LOST):
                    lost[step] = None
                elif lost:
                    lost.pop(step, None)
                if not self.count:
                    self.first_time = float(head[1])
                self.count += 1
                last = head[1]
            elif (event := _event(line)) is not None:
                self._take(event, offset)
                last = b""
            offset += len(line)
        self._read = offset
        if last:
            self.last_time = float(last)

    def _take(self, event: Event, offset: int) -> None:
        kind = event["kind"]
        self.last_time = float(event["time"])
        if not self.count:
            self.first_time = self.last_time
        self.count += 1
        if kind in UNDOING and whole(event.get("step")) is not None:
            for track in self._tracks.values():
                track.undo(event["step"])
            if self._curve is not None:
                self._curve.undo(event["step"])
        if kind in self._tracks:
            self._tracks[kind].add(event["step"], offset)
            if self._curve is not None and kind in CURVE:
                self._curve.add_event(kind, event["step"], offset)
            if kind == "step":
                self._lost.pop(event["step"], None)
                if event.get("loss") is not None and finite(event["loss"]) is None:
                    self._lost[event["step"]] = None
        if kind in NOTABLE:
            (self._early if len(self._early) < MOST_NOTABLE else self._late).append(event)
        elif kind.startswith(("run_", "train_", "stage_")):
            self.others.append(event)


def warnings_of(path: Path) -> Iterator[Event]:
    """The warnings of another rank; its other events repeat rank 0's."""
    with open_regular(path) as file:
        for line in file:
            if b'"warning"' in line and (event := _event(line)) is not None and event["kind"] == "warning":
                yield event


def _at(file: IO[bytes], offset: int, kind: str) -> Event | None:
    file.seek(offset)
    event = _event(file.readline())
    return event if event is not None and event["kind"] == kind else None


def _event(line: bytes) -> Event | None:
    """The event of a line; None if it is torn or foreign, or lacks a time or a step that its kind needs."""
    event = parse_event(line)
    if event is None:
        return None
    if finite(event.get("time")) is None:
        return None
    needs_step = event["kind"] in TRACKED or event["kind"] == "restored"
    return None if needs_step and whole(event.get("step")) is None else event
