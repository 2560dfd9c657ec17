"""The run's diary: append-only JSON lines, one file per rank (docs/formats.md gives the kinds and fields).

A writer that died in the middle of a line leaves a torn tail; the next writer starts a new line, readers skip
the tail. Each line ends with a checksum of what precedes it, so that a damaged line is skipped too and never read as
something else. A run that continues from step k repeats the steps after k: `steps` keeps the last account of each.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import check_regular, open_regular, storage

FORMAT = 2
UNDOING = ("restored", "train_started")
"""Kinds of events after which steps above theirs no longer count. A run that is killed before its first checkpoint
starts anew without a restore."""
_MARK = b', "crc": '

Event = dict[str, Any]


class EventLog:
    """Appends to `folder/events.jsonl` (rank 0) or `folder/events-RANK.jsonl`; every line is flushed."""

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        self.path = events_path(folder, rank=rank)
        self._rank = rank
        with storage(f"opening {self.path}"):
            folder.mkdir(parents=True, exist_ok=True)
            if self.path.is_fifo():  # to open it for writing waits for a reader
                check_regular(self.path)
            self._file = open(self.path, "ab")  # noqa: SIM115 - lives as long as the log
            if self._file.tell() and not _ends_with_newline(self.path):
                self._file.write(b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Appends one event. Non-finite numbers become strings ("nan", "inf"): JSON has no others."""
        event = {"format": FORMAT, "time": round(time.time(), 3), "rank": self._rank, "kind": kind}
        line = json.dumps({**event, **_finite(fields)}, ensure_ascii=False)
        with storage(f"writing {self.path}"):
            # A command line may hold bytes that are not UTF-8: lone surrogates, which JSON spells \udcff.
            self._file.write(_summed(line.encode("utf-8", "backslashreplace")) + b"\n")
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
    """Every whole event in order; a torn, foreign or damaged line is skipped. No file, no events; DamagedFile for
    something else in its place."""
    if not path.exists():
        return
    with open_regular(path) as file:
        for line in file:
            event = parse_event(line)
            if event is not None:
                yield event


def parse_event(line: bytes) -> Event | None:
    """The event of a line; None when it is torn, foreign or damaged. Lines of format 1 had no checksum."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str):
        return None
    if event.get("format") == FORMAT and line.rstrip(b"\n") == _summed(line.rpartition(_MARK)[0] + b"}"):
        del event["crc"]
        return event
    return event if event.get("format") == 1 else None


def steps(events: list[Event], kind: str = "step") -> list[Event]:
    """The events of `kind` that count, by step: the last account of each, without what a restore or a new start
    undid."""
    kept: dict[int, Event] = {}
    for event in events:
        if event["kind"] in UNDOING and isinstance(event.get("step"), int):
            kept = {step: value for step, value in kept.items() if step <= event["step"]}
        if event["kind"] == kind:
            kept[event["step"]] = event
    return [kept[step] for step in sorted(kept)]


def _summed(line: bytes) -> bytes:
    """A line with the checksum of what precedes it as its last key."""
    body = line[:-1]
    return body + _MARK + b"%d}" % zlib.crc32(body)


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
