"""How long work takes, told to whoever listens.

Library code reports to a `Progress`; the command line passes one that draws on stderr, a library user passes
their own or nothing.
"""

from __future__ import annotations

import sys
import time
from typing import Protocol

_PREFIXES = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class Progress(Protocol):
    """Receives what a stage has done. Calls are cheap; the receiver decides how often to draw."""

    def begin(self, task: str, total: float | None, unit: str) -> None:
        """`task` starts; `total` units are expected, None when unknown."""

    def advance(self, done: float, note: str = "") -> None:
        """`done` units of the current task are complete (absolute, not a difference)."""

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

    def begin(self, task: str, total: float | None, unit: str) -> None:
        self.say(f"{task}: {total:.0f} {unit}" if total else task)

    def advance(self, done: float, note: str = "") -> None:
        if note:
            self.say(note)

    def end(self, note: str = "") -> None:
        self.say(note)

    def say(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class Eta:
    """Seconds left, from the pace of this process (work done before it does not count) over the last half or more of
    what it has done: what only the beginning takes, say a compiler, is soon forgotten."""

    def __init__(self, total: float | None) -> None:
        self._total, self._start = total, time.monotonic()
        self._marks: list[tuple[float, float]] = []
        """Moments, and what was done by then: the first one, and those since which the pace counts now and soon."""

    def seconds(self, done: float) -> float | None:
        """None until there is a pace to extrapolate."""
        now = time.monotonic()
        if not self._marks or done < self._marks[-1][1]:  # or work was taken back
            self._marks = [(now if self._marks else self._start, done)] * 3
        first, _, later = self._marks
        doubled = done > later[1] and done - first[1] >= 2 * (later[1] - first[1])
        # What several workers finish in one moment is no pace.
        if doubled and now - later[0] >= (now - self._start) / 4:
            self._marks[1:] = later, (now, done)
        since = self._marks[1]
        if self._total is None or done <= since[1] or now - self._start < 0.5:
            return None
        return max(0.0, (self._total - done) * (now - since[0]) / (done - since[1]))


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
