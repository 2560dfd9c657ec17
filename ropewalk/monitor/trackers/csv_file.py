"""A curve as CSV: one row per step with its training values and those of a validation after it. Values that were not
measured are empty, others are written in full precision (`nan` and `inf` included).
"""

from __future__ import annotations

import csv
import io
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from ropewalk.base.errors import UserError

from ..follow import CURVE_FIELDS, Point
from .appending import AppendedFile

COLUMNS = ("run", "step", "time", *(figure.column for figure in CURVE_FIELDS))
PIECE = 1 << 20


class CsvTracker:
    """A tracker that writes the file `place`."""

    def __init__(self, place: Path, run: str) -> None:
        self._run = run
        self._file = AppendedFile(place)
        self._steps, self._offsets = array("q"), array("q")
        self._size = 0
        self._last: list[Point] = []
        """The points of the last row."""

    def resume(self, points: Iterator[Point]) -> int:
        data = self._file.read()
        header = _line(COLUMNS)
        if data and not data.startswith(header) and not header.startswith(data):
            self._refuse("is not a table of a run")
        name, first = _line([self._run, ""])[:-1], data[len(header) :]
        if not (first.startswith(name) or name.startswith(first)):
            self._refuse(f"holds another run than {self._run}")
        self._size, kept = len(header), 0
        if not data.startswith(header):
            self._file.cut(0)
            self._file.append(header)
            return 0
        for step, same in groupby(points, key=lambda point: point.step):
            several = list(same)
            row = self._row(several)
            if data[self._size : self._size + len(row)] != row:
                break
            self._note(step, several, len(row))
            kept += len(several)
        self._file.cut(self._size)
        return kept

    def drop(self, step: int) -> None:
        place = bisect_left(self._steps, step)
        if place < len(self._steps):
            self._size = self._offsets[place]
            del self._steps[place:], self._offsets[place:]
            self._file.cut(self._size)
        self._last = []

    def write(self, points: Iterator[Point]) -> None:
        held = bytearray()
        for step, same in groupby(points, key=lambda point: point.step):
            several = list(same)
            if self._last and self._last[0].step == step:  # the validation of the last row
                several = [*self._last, *several]
                self.drop(step)
            row = self._row(several)
            self._note(step, several, len(row))
            held += row
            if len(held) > PIECE:
                self._file.append(bytes(held))
                held.clear()
        self._file.append(bytes(held))

    def close(self) -> None:
        self._file.close()

    def _row(self, points: list[Point]) -> bytes:
        figures = {name: value for point in points for name, value in point.figures.items()}
        values = (figures.get(figure.name) for figure in CURVE_FIELDS)
        shown = ("" if value is None else _number(value) for value in values)
        return _line([self._run, str(points[0].step), _number(points[0].time), *shown])

    def _note(self, step: int, points: list[Point], size: int) -> None:
        self._steps.append(step)
        self._offsets.append(self._size)
        self._size += size
        self._last = points

    def _refuse(self, why: str) -> None:
        raise UserError(f"{self._file.path}: this file {why}; name another one, or delete it")


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)


def _line(values: list[str] | tuple[str, ...]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()
