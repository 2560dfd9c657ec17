"""Copies on disk: rows (start, stop, source), in files that ascend by start in one or more runs.

They are read, not mapped, and merged a stretch of text at a time: there may be many times as many of them as memory
holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ropewalk.store.sealed import content_bytes

from ..columns import Rows

BLOCK_ROWS = 1 << 12
"""Rows of a run that are read at a time."""
_COLUMNS = 3
_ROW_BYTES = 8 * _COLUMNS


def write_copies(file: IO[Any], rows: Rows) -> None:
    """Appends ascending `rows`."""
    file.write(np.ascontiguousarray(rows))


def merged(paths: Sequence[Path], regions: Sequence[tuple[int, int]]) -> Iterator[Rows]:
    """For each region of the text the rows of all files that start in it, ascending."""
    runs = [run for path in paths for run in _runs(path)]
    for _, end in regions:
        rows = np.concatenate([np.empty((0, _COLUMNS), np.int64), *(run.take(end) for run in runs)])
        yield rows[np.argsort(rows[:, 0])]


@dataclass(slots=True)
class _Run:
    """Rows of a file from `at` to `end`, and those already read."""

    path: Path
    at: int
    end: int
    held: Rows

    def take(self, until: int) -> Rows:
        """The next rows that start before `until`."""
        taken = []
        while True:
            cut = int(np.searchsorted(self.held[:, 0], until))
            taken.append(self.held[:cut])
            self.held = self.held[cut:]
            if len(self.held) or self.at == self.end:
                return np.concatenate(taken)
            self.held = _read(self.path, self.at, min(self.at + BLOCK_ROWS, self.end))
            self.at += len(self.held)


def _runs(path: Path) -> list[_Run]:
    rows, last = content_bytes(path) // _ROW_BYTES, 0
    borders = [0]
    for begin in range(0, rows, BLOCK_ROWS):
        starts = np.append(last, _read(path, begin, min(begin + BLOCK_ROWS, rows))[:, 0])
        borders += (begin + np.flatnonzero(np.diff(starts) < 0)).tolist()
        last = starts[-1]
    nothing = np.empty((0, _COLUMNS), np.int64)
    return [_Run(path, begin, end, nothing) for begin, end in zip(borders, [*borders[1:], rows], strict=True)]


def _read(path: Path, begin: int, end: int) -> Rows:
    return np.fromfile(path, np.int64, (end - begin) * _COLUMNS, offset=begin * _ROW_BYTES).reshape(-1, _COLUMNS)
