"""How long work takes, told to whoever listens.

Library code reports to a `Progress`; the command line passes one that draws on stderr, a library user passes
their own or nothing.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_PREFIXES = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Progress(Protocol):
    """Receives what a stage has done. Calls are cheap; the receiver decides how often to draw."""

    def begin(self, task: str, total: float | None, unit: str) -> None:
        """`task` starts; `total` units are expected, None when unknown."""

    def advance(self, done: float, note: str = "") -> None:
        """`done` units of the current task are complete (absolute, not a difference). `note` holds figures separated by
        two spaces or more, the most important first: a narrow terminal shows those that fit. An empty note leaves the
        last one."""

    def end(self, note: str = "") -> None:
        """The current task is complete; `note` sums it up."""

    def say(self, text: str) -> None:
        """A line for the reader, apart from any task."""


class Silent:
    """A `Progress` that hears everything and says nothing."""

    def begin(self, task: str, total: float | None, unit: str) -> None: ...
    def advance(self, done: float, note: str = "") -> None: ...
    def end(self, note: str = "") -> None: ...
    def say(self, text: str) -> None: ...


class Lines:
    """A `Progress` of plain lines on stderr, for a log file."""

    def __init__(self) -> None:
        self._task, self._unit = "", ""
        self._total: float | None = None

    def begin(self, task: str, total: float | None, unit: str) -> None:
        self._task, self._total, self._unit = task, total, unit
        self.say(f"{task}: {total:.0f} {unit}" if total else task)

    def advance(self, done: float, note: str = "") -> None:
        if note and self._total:
            whole = f"{self._total:.0f}"
            self.say(f"{self._task} {done:>{len(whole)}.0f}/{whole} {self._unit}  {note}")
        elif note:
            self.say(note)

    def end(self, note: str = "") -> None:
        self.say(note)

    def say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


RECENT_S, RECENT_SHARE, RECENT_CALLS = 10.0, 0.25, 16
"""The pace is that of the last quarter of the time, of no less than 10 s and 16 advances."""


@dataclass(frozen=True, slots=True)
class _Mark:
    time: float
    done: float
    calls: int


class Eta:
    """Seconds left, from the recent pace of this process: work done before it does not count, and what only the
    beginning takes, say a compiler, is soon forgotten."""

    def __init__(self, total: float | None, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.monotonic
        self._total, self._start = total, self._clock()
        self._marks: deque[_Mark] = deque()
        """From the one since which the pace counts."""
        self._calls = 0
        self.rate: float | None = None
        """Units per second, recently."""

    def seconds(self, done: float) -> float | None:
        """None until there is a pace to extrapolate."""
        now = self._clock()
        if not self._marks or done < self._marks[-1].done:  # or work was taken back
            self._calls, self.rate = 0, None
            self._marks = deque([_Mark(now if self._marks else self._start, done, 0)])
            return None
        marks, spent = self._marks, now - self._start
        self._calls += done > marks[-1].done
        recent = max(RECENT_S, RECENT_SHARE * spent)
        while len(marks) > 1 and now - marks[1].time >= recent and self._calls - marks[1].calls >= RECENT_CALLS:
            marks.popleft()
        since = marks[0]
        # Few marks are enough: a quarter of the time then has 16 of them or more.
        if done > marks[-1].done and now - marks[-1].time >= spent / 64:
            marks.append(_Mark(now, done, self._calls))
        if done <= since.done or spent < 0.5:
            return None
        self.rate = (done - since.done) / max(now - since.time, 1e-9)
        return None if self._total is None else max(0.0, (self._total - done) / self.rate)


def duration(seconds: float) -> str:
    """`seconds` for people: 0.4 s, 12 s, 3 min 05 s, 2 h 10 min."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def span(low: float, high: float) -> str:
    """Two numbers of seconds as one interval, in the unit of the longer one and with the digits that an estimate has:
    4 to 9 minutes, 1.5 to 3 hours."""
    units = ((172800.0, 86400.0, "days"), (5400.0, 3600.0, "hours"), (90.0, 60.0, "minutes"))
    size, name = next(((size, name) for least, size, name in units if high >= least), (1.0, "seconds"))
    first, last = (_estimated(seconds / size) for seconds in (low, high))
    return f"{last} {name}" if first == last else f"{first} to {last} {name}"


def _estimated(value: float) -> str:
    if value >= 9.95:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{max(0.1, value):.1f}".removesuffix(".0")


def counted(number: int, noun: str) -> str:
    """`number` with its noun: 1 row, 4 rows."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def amount(value: float, unit: str = "") -> str:
    """`value` with a decimal prefix, three digits: 950, 12.3 k, 4.56 MB, 4.56 M tokens."""
    rounded = float(f"{value:.3g}")  # before the prefix is chosen: 999 999 is 1 M, not 1e+03 k
    for factor, prefix in _PREFIXES:
        if abs(rounded) >= factor:
            # A symbol joins the prefix, a word stands apart.
            return f"{rounded / factor:.3g} {prefix}{unit if len(unit) <= 2 else f' {unit}'}"
    text = f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"
    return f"{text} {unit}".rstrip()
