"""The run's diary: append-only JSON lines, one file per rank (docs/formats.md gives the kinds and fields).

A writer that died in the middle of a line leaves a torn tail; the next writer starts a new line, readers skip
the tail. A run that continues from step k repeats the steps after k: `steps` keeps the last account of each.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import storage

FORMAT = 1

Event = dict[str, Any]


class EventLog:
    """Appends to `folder/events.jsonl` (rank 0) or `folder/events-RANK.jsonl`; every line is flushed."""

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        self.path = events_path(folder, rank=rank)
        self._rank = rank
        with storage(f"opening {self.path}"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab")  # noqa: SIM115 - lives as long as the log
            if self._file.tell() and not _ends_with_newline(self.path):
                self._file.write(b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one event. Non-finite numbers become strings ("nan", "inf"): JSON has no others."""
        event = {"format": FORMAT, "time": round(time.time(), 3), "rank": self._rank, "kind": kind}
        line = json.dumps({**event, **_finite(fields)}, ensure_ascii=False)
        with storage(f"writing {self.path}"):
            # A command line may hold bytes that are not UTF-8: lone surrogates, which JSON spells \udcff.
            self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Makes the log durable and closes it."""
        if self._file.closed:
            return
        with storage(f"writing {self.path}"), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def events_path(folder: Path, *, rank: int = 0) -> Path:
    """Where rank `rank` of the run in `folder` writes."""
    return folder / ("events.jsonl" if rank == 0 else f"events-{rank}.jsonl")


def read_events(path: Path) -> Iterator[Event]:
    """Every whole event in order; a torn or foreign line is skipped. No file, no events."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and event.get("format") == FORMAT and "kind" in event:
                yield event


def steps(events: list[Event], kind: str = "step") -> list[Event]:
    """The events of `kind` that count, by step: the last account of each, without what a restore undid."""
    kept: dict[int, Event] = {}
    for event in events:
        if event["kind"] == "restored":
            kept = {step: value for step, value in kept.items() if step <= event["step"]}
        elif event["kind"] == kind:
            kept[event["step"]] = event
    return [kept[step] for step in sorted(kept)]


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, dict):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    return value
