"""Lists the newest runs of a folder, one line each. Reads only the end of a run's events, so long runs take no
longer than short ones."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import DataError
from ropewalk.base.events import Event, events_path, parse_event
from ropewalk.base.files import lock_owner, read_regular
from ropewalk.base.metric import headline, read_tasks, titled
from ropewalk.base.seal import parse_sealed

from .run_view import SEALED_SINCE, reached_end
from .values import finite, mapping, whole

END_BYTES = 1 << 18
"""Bytes read at the end of the events: a few hundred events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLine:
    """The status of a run."""

    folder: str
    state: Literal["running", "finished", "stopped"]
    step: int | None
    steps: int | None
    """Total steps of the run."""
    loss: float | None
    """Loss of the last logged step."""
    validation_loss: float | None
    bits_per_byte: float | None
    """Final evaluation on whole held-out documents."""
    evaluation: str
    """The headline of the evaluation at the end: "1.317 held-out bits per byte"."""
    changed: float
    """Time of the last event, in seconds since 1970."""


def newest_runs(runs: Path, *, most: int = 10) -> list[RunLine]:
    """The runs in the folder `runs`, the most recently changed first."""
    if not runs.is_dir():
        raise DataError(f"{runs}: no such folder; --runs names the one that holds your runs")
    found = []
    for folder in runs.iterdir():
        try:
            events = events_path(folder).stat()
        except OSError:  # not a run
            continue
        if stat.S_ISREG(events.st_mode):
            found.append((events.st_mtime, folder))
    newest = sorted(found, key=lambda each: (-each[0], each[1]))[:most]
    return [_line(folder, changed) for changed, folder in newest]


def _line(folder: Path, changed: float) -> RunLine:
    events = _last_events(events_path(folder))
    step, validation = (
        next((event for event in reversed(events) if event["kind"] == kind), {}) for kind in ("step", "validation")
    )
    running = lock_owner(folder) is not None
    finished = bool(reached_end(events, idle=not running))
    summary = _object(folder / "summary.json") if finished else {}
    state: Literal["running", "finished", "stopped"] = "finished" if finished else "stopped"
    evaluation = _object(folder / "evaluation" / "results.json") if finished else {}
    first = headline(read_tasks(evaluation) or read_tasks(summary))
    if running:
        state = "running"
    return RunLine(
        folder=str(folder),
        state=state,
        step=whole(step.get("step")),
        steps=whole(mapping(_object(folder / "plan.json").get("derived")).get("steps")),
        loss=finite(step.get("loss")),
        validation_loss=finite(validation.get("loss")),
        bits_per_byte=finite(summary.get("bits_per_byte")),
        evaluation=f"{first[1].text()} {titled(*first)}" if first else "",
        changed=changed,
    )


def _last_events(path: Path) -> list[Event]:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES))
        lines = file.read().split(b"\n")
    found = map(parse_event, lines[1:] if size > END_BYTES else lines)
    return [event for event in found if event is not None]


def _object(path: Path) -> Any:
    """A file of the run; empty if it is absent or damaged, which `monitor RUN` reports."""
    try:
        since = SEALED_SINCE.get(path.name, 2)
        return mapping(parse_sealed(read_regular(path), path=path, what=path.name, remedy="", sealed_since=since))
    except (OSError, DataError):
        return {}
