"""Progress on stderr: one live line on a terminal, plain lines elsewhere; results go to stdout."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

import typer

from ropewalk.base.progress import Eta, amount, duration
from ropewalk.config.ranks import ranks

LINE_EVERY_S = 10.0
"""Between plain lines of one task, where nothing can be redrawn."""
REDRAW_EVERY_S = 0.2


class Console:
    """A `Progress` for people."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._task, self._unit = "", ""
        self._total: float | None = None
        self._eta = Eta(None)
        self._start = self._drawn = 0.0
        self._dirty = False

    def begin(self, task: str, total: float | None, unit: str) -> None:
        self._task, self._total, self._unit = task, total, unit
        self._eta = Eta(total)
        self._start = time.monotonic()
        self._drawn = 0.0 if self._live else self._start - LINE_EVERY_S + 2.0
        if self._live:
            self._draw(0, "")

    def advance(self, done: float, note: str = "") -> None:
        left = self._eta.seconds(done)
        now = time.monotonic()
        if now - self._drawn < (REDRAW_EVERY_S if self._live else LINE_EVERY_S):
            return
        self._drawn = now
        self._draw(done, f"{note}  " * bool(note) + (f"ETA {duration(left)}" if left is not None else ""))

    def end(self, note: str = "") -> None:
        spent = duration(time.monotonic() - self._start)
        self._line(f"{self._task:<12} {note or 'done'}" + ("" if spent in note else f"  ({spent})"))

    def say(self, text: str) -> None:
        self._line(text)

    def _draw(self, done: float, note: str) -> None:
        share = f"{done / self._total:4.0%} of {amount(self._total)}" if self._total else amount(done)
        text = f"{self._task:<12} {share} {self._unit}  {note}".rstrip()
        if self._live:
            self._stream.write(f"\r\x1b[K{text[: _width()]}")
            self._stream.flush()
            self._dirty = True
        else:
            self._line(text)

    def _line(self, text: str) -> None:
        clear = "\r\x1b[K" if self._dirty else ""
        self._dirty = False
        self._stream.write(f"{clear}{text}\n")
        self._stream.flush()


def emit(value: Any, *, as_json: bool, text: str) -> None:
    """The result of a verb on stdout: `value` as one JSON object, or `text`. Of the processes that a launcher started
    only the first one has a result to show."""
    if ranks().rank > 0:
        return
    typer.echo(json.dumps(value, ensure_ascii=False, default=str) if as_json else text)


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _width() -> int:
    import shutil

    return max(20, shutil.get_terminal_size().columns - 1)
