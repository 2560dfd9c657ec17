"""Progress that one process tells and another shows: calls of a `Progress` as JSON lines in a file."""

from __future__ import annotations

import json
import time
from pathlib import Path

from .files import storage
from .progress import Progress

LOGS, PROGRESS = "logs", "progress.jsonl"
"""Of a run directory: the folder of what its processes say, and the file of what the first one tells."""

CALLS = ("begin", "advance", "end", "say")
ADVANCE_EVERY_S = 0.25
"""Between two advances without a note: the file of a long run holds no line per step."""


class Relay:
    """A `Progress` that writes what it hears to a file, and passes it on to another one here."""

    def __init__(self, path: Path, also: Progress) -> None:
        self._also = also
        with storage(f"opening {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the relay
        self._advanced = 0.0

    def begin(self, task: str, total: float | None, unit: str) -> None:
        self._write("begin", task, total, unit)
        self._also.begin(task, total, unit)

    def advance(self, done: float, note: str = "") -> None:
        now = time.monotonic()
        if note or now - self._advanced >= ADVANCE_EVERY_S:
            self._advanced = now
            self._write("advance", done, note)
        self._also.advance(done, note)

    def end(self, note: str = "") -> None:
        self._write("end", note)
        self._also.end(note)

    def say(self, text: str) -> None:
        self._write("say", text)
        self._also.say(text)

    def _write(self, call: str, *arguments: str | float | None) -> None:
        self._file.write(json.dumps([call, *arguments]) + "\n")
        self._file.flush()


class Tail:
    """The lines that are appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[bytes]:
        """Those that are whole and were not given before."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.split(b"\n") if newline else []


def replay(lines: list[bytes], progress: Progress) -> None:
    """Tells `progress` what a `Relay` heard; a torn line, from a process that was killed, is skipped."""
    for line in lines:
        try:
            call, *arguments = json.loads(line)
        except ValueError:
            continue
        assert call in CALLS, f"{call} is not a call of Progress"
        getattr(progress, call)(*arguments)
