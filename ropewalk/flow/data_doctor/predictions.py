"""Predictions of `doctor data` for a run and their errors: `doctor.json` in the run directory.

A prediction is compared only with steps that came after it, so it cannot be copied from them.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from ropewalk.base.events import Event, events_path, read_events, steps
from ropewalk.base.seal import read_sealed, write_sealed

FILE = "doctor.json"
FORMAT = 2
SEALED_SINCE = 2
KEPT = 20
"""Predictions to keep."""
CHANGED = 0.1
"""Relative change of the step's speed that makes tuned settings stale."""

Record = dict[str, Any]


def read_record(run: Path) -> Record:
    """Earlier predictions; empty for a run without any."""
    path = run / FILE
    if not path.exists():
        return {"format": FORMAT, "predictions": [], "tuned": None}
    return read_sealed(
        path,
        what="record of predictions",
        remedy="delete it; the doctor then starts without earlier predictions",
        current=FORMAT,
        sealed_since=SEALED_SINCE,
        upgrades={1: lambda tree: tree},
    )


def remember(run: Path, record: Record, *, tokens_per_s: float, compute: float, binding: str) -> None:
    """Adds a prediction, with the present time."""
    made = {"time": time.time(), "tokens_per_s": tokens_per_s, "compute_tokens_per_s": compute, "binding": binding}
    predictions = [*record["predictions"], made][-KEPT:]
    write_sealed(run / FILE, {**record, "predictions": predictions})


def remember_tuning(run: Path, *, compute: float, settings: dict[str, Any]) -> None:
    """Records the step speed for which settings were tuned."""
    tuned = {"time": time.time(), "compute_tokens_per_s": compute, "settings": settings}
    write_sealed(run / FILE, {**read_record(run), "tuned": tuned})


def last_error(record: Record, run: Path) -> Record | None:
    """The newest prediction followed by steps, with their measured speed; None if there is none."""
    events = step_events(run)
    for made in reversed(record["predictions"]):
        after = [event["tokens_per_s"] for event in events if event["time"] > made["time"]]
        if len(after) > 1:
            after = after[1:]  # the first interval includes the start-up
        if after:
            measured = statistics.median(after)
            predicted = made["tokens_per_s"]
            return {"predicted": predicted, "measured": measured, "error": predicted / measured - 1.0}
    return None


def compute_speed(run: Path, *, intervals: int = 20) -> float | None:
    """Tokens per second of the step alone, without data waits, over the last intervals of a run."""
    events = step_events(run)
    alone = [
        event["tokens_per_s"] * event["step_s"] / (event["step_s"] - event["data_wait_s"])
        for event in (events[1:] or events)[-intervals:]
        if event["step_s"] > event["data_wait_s"]
    ]
    return statistics.median(alone) if alone else None


def tuning_is_stale(record: Record, compute: float) -> bool:
    """Whether the step's speed has changed since the settings were tuned."""
    tuned = record["tuned"]
    return tuned is not None and abs(compute / tuned["compute_tokens_per_s"] - 1.0) > CHANGED


def step_events(run: Path) -> list[Event]:
    """The training intervals still in force, oldest first."""
    return steps(list(read_events(events_path(run))))
