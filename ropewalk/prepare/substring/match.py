"""Copies in some parts of the sifted corpus: each window is looked up by its hash and compared byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..columns import Rows
from ..config import Substring
from ..kernels import minimizers, repeats
from .copies import write_copies
from .corpus import Corpus, open_corpus, sealed_file
from .sift import read_part

PARTS_A_TASK = 32
WINDOW_BYTES = 32
"""Memory for a window: an entry of 8 bytes in a table that is a half to a quarter full."""
SORTED_ROWS = 1 << 20
"""Copies that wait in memory until they are sorted and written."""
_ROWS = 1 << 16
"""Copies that the kernel writes in one call; a stretch has at most two for each byte that windows reach."""


@dataclass(frozen=True, slots=True)
class MatchTask:
    """Some parts of the stretches that `sift` leaves."""

    folder: Path
    settings: Substring
    parts: range


def match_tasks(folder: Path, settings: Substring, *, parts: int) -> list[MatchTask]:
    """The tasks of all `parts`."""
    ranges = (range(first, min(first + PARTS_A_TASK, parts)) for first in range(0, parts, PARTS_A_TASK))
    return [MatchTask(folder, settings, some) for some in ranges]


def match(task: MatchTask) -> Path:
    """Commits the copies among the windows of a task, rows (start, stop, source) that ascend in runs."""
    target = task.folder / "copies" / f"part-{task.parts[0]:05d}.bin"
    if not target.exists():
        corpus = open_corpus(task.folder, task.settings)
        waiting: list[Rows] = []
        with sealed_file(target) as file:
            for part in task.parts:
                for rows in _copies(corpus, read_part(task.folder, part), task.settings.memory_bytes):
                    waiting.append(rows)
                    if sum(map(len, waiting)) > SORTED_ROWS:
                        write_copies(file, _sorted(waiting))
                        waiting.clear()
            if waiting:
                write_copies(file, _sorted(waiting))
    return target


def _copies(corpus: Corpus, candidates: Rows, memory_bytes: int) -> Iterator[Rows]:
    windows = int((candidates[:, 1] - candidates[:, 0]).sum())
    # A part that is too large for one table, as when a million lines of dashes meet in it, takes turns.
    turns = -(-windows * WINDOW_BYTES // memory_bytes) or 1
    table = np.empty(1 << (2 * windows // turns).bit_length(), np.uint64)
    copies = np.empty((max(_ROWS, 2 * corpus.reach), 3), np.int64)
    values = minimizers.byte_values()
    for turn in range(turns):
        table[:] = 0
        done = 0
        while done < len(candidates):
            done, count = repeats.match(
                *(corpus.text, corpus.bounds, candidates, done, corpus.length, corpus.unit, corpus.classes),
                *(values, turns, turn, table, copies),
            )
            yield copies[:count].copy()


def _sorted(waiting: list[Rows]) -> Rows:
    rows = np.concatenate(waiting)
    return rows[np.argsort(rows[:, 0], kind="stable")]
