"""Progress on stderr: one live line on a terminal, plain lines elsewhere; results go to stdout."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

import typer

from ropewalk.base.progress import Eta, amount, duration
from ropewalk.config.ranks import ranks
from ropewalk.config.terminal import redraws

if TYPE_CHECKING:
    from rich.text import Text

LINE_EVERY_S = 10.0
"""Seconds between plain lines of a task, where nothing can be redrawn."""
FIRST_FIGURES = 2
"""Parts of a note shown before the time left: loss and tokens per second."""

_open: ContextVar[list[Console]] = ContextVar("open consoles")


class Console:
    """A `Progress` for terminals and logs."""

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        frames_per_s: float | None = None,
    ) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._task, self._unit, self._note = "", "", ""
        self._total: float | None = None
        self._done = 0.0
        self._left: float | None = None
        self._eta = Eta(None, clock)
        self._start = self._drawn = self._asked = 0.0
        self._live = None
        if redraws(self._stream):
            from .live import FRAMES_PER_S, LiveLine  # rich, 0.1 s

            rate = FRAMES_PER_S if frames_per_s is None else frames_per_s
            self._live = LiveLine(self._stream, self._frame, frames_per_s=rate)
            _open.get([]).append(self)

    def begin(self, task: str, total: float | None, unit: str) -> None:
        self._task, self._total, self._unit, self._note = task, total, unit, ""
        self._done, self._left, self._eta = 0.0, None, Eta(total, self._clock)
        self._start = self._clock()
        self._drawn = self._start - LINE_EVERY_S + 2.0
        if self._live:
            self._live.show()

    def advance(self, done: float, note: str = "") -> None:
        self._left, self._asked = self._eta.seconds(done), self._clock()
        self._done, self._note = done, note or self._note
        if self._live or (self._note and not note) or self._asked - self._drawn < LINE_EVERY_S:
            return
        self._drawn = self._asked
        self._line(self._plain())

    def end(self, note: str = "") -> None:
        spent = duration(self._clock() - self._start)
        self.close()
        self._line(f"{self._task:<12} {note or 'done'}" + ("" if spent in note else f"  ({spent})"))

    def say(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        """Removes the live line, so that the next output gets its own line."""
        if self._live:
            self._live.hide()

    def _frame(self, width: int) -> Text:
        """The current live line; the time left counts down between advances."""
        from .live import line

        assert self._live is not None
        now = self._clock()
        figures = [figure for figure in re.split(r"\s{2,}", self._note.strip()) if figure]
        if self._eta.rate is not None and "/s" not in self._note:
            figures.insert(0, f"{amount(self._eta.rate, self._unit)}/s")
        left = "-" if self._left is None else duration(max(0.0, self._left - (now - self._asked)))
        if self._total:
            done = f"{amount(self._done)} of {amount(self._total, self._unit)}"
            share: float | None = self._done / self._total
            first, others = [*figures[:FIRST_FIGURES], f"ETA {left}"], [done, *figures[FIRST_FIGURES:]]
        else:
            share = None
            counted = [amount(self._done, self._unit)] if self._done else []
            first, others = [*counted, *figures[:FIRST_FIGURES], duration(now - self._start)], figures[FIRST_FIGURES:]
        return line(self._task, share, first, others, width=width, characters=self._live.characters)

    def _plain(self) -> str:
        share = f"{self._done / self._total:4.0%} of {amount(self._total, self._unit)}" if self._total else ""
        share = share or amount(self._done, self._unit)
        left = f"ETA {duration(self._left):<12}" if self._left is not None else ""
        return f"{self._task:<12} {share}  {left}  {self._note}".rstrip()

    def _line(self, text: str) -> None:
        if self._live:
            self._live.say(text)
            return
        self._stream.write(f"{text}\n")
        self._stream.flush()


@contextlib.contextmanager
def closing_consoles() -> Iterator[None]:
    """Removes the live lines of all Consoles created in the block, however it ends."""
    token = _open.set([])
    try:
        yield
    finally:
        for console in _open.get():
            console.close()
        _open.reset(token)


def emit(value: Any, *, as_json: bool, text: str) -> None:
    """Prints the result of a verb on stdout: `value` as one JSON object, or `text`. Under a launcher only rank 0
    prints."""
    if ranks().rank > 0:
        return
    typer.echo(json.dumps(value, ensure_ascii=False, default=str) if as_json else text)


def table(rows: list[tuple[str, str]]) -> str:
    """Two aligned columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
