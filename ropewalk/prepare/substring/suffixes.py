"""Copies in one range of the suffix array: the reference that the faster way must equal, in the same bounded memory.

Splitters, drawn evenly from the text and sorted, cut the array into ranges of about equal size. A range is a task: it
collects its suffixes in one pass over the text, sorts them and commits its copies. Equal windows lie in one range, and
must fit into memory together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..columns import Offsets
from ..config import Substring
from ..kernels import suffix
from .copies import write_copies
from .corpus import Corpus, open_corpus, read_rows, sealed_file

SUFFIX_BYTES = 48
"""Memory for a suffix: start, stop and key, the order of the copies, and what the splitters are out by."""
WRITTEN_ROWS = 100_000
"""Copies that are brought into rows at a time."""
_DRAWN = 1 << 16
"""Windows drawn for splitters: a hundred ranges are then equal within a tenth."""


@dataclass(frozen=True, slots=True)
class RangeTask:
    """The suffixes from one splitter to the next; at the ends of the array a splitter is empty."""

    folder: Path
    settings: Substring
    name: str
    least: tuple[int, ...]
    most: tuple[int, ...]
    expected: int


def range_tasks(folder: Path, settings: Substring) -> list[RangeTask]:
    """The ranges of a suffix array that needs `settings.memory_bytes` at a time; reads the text once."""
    corpus = open_corpus(folder, settings)
    windows, starts, stops = _draw(corpus)
    ranges = -(-windows * SUFFIX_BYTES // settings.memory_bytes) or 1
    path = folder / f"splitters-{ranges}.bin"
    if not path.exists():
        suffix.sort(corpus.text, starts, stops, np.empty(len(starts), np.uint64))
        chosen = np.arange(1, ranges) * len(starts) // ranges
        with sealed_file(path) as file:
            file.write(np.stack([starts[chosen], stops[chosen]], axis=1))
    splitters = [(), *map(tuple, read_rows(path, columns=2).tolist()), ()]
    return [
        RangeTask(
            folder, settings, f"{ranges}-{index:04d}.bin", splitters[index], splitters[index + 1], windows // ranges
        )
        for index in range(ranges)
    ]


def match_range(task: RangeTask) -> Path:
    """Commits the copies among the windows of a range, as rows (start, stop, source), ascending."""
    target = task.folder / "copies" / task.name
    if not target.exists():
        corpus = open_corpus(task.folder, task.settings)
        starts, stops = _collect(corpus, task)
        firsts = np.empty(len(starts), np.uint64)
        suffix.sort(corpus.text, starts, stops, firsts)
        count = suffix.compact(starts, stops, firsts)
        order = np.argsort(starts[:count])
        with sealed_file(target) as file:
            for some in np.array_split(order, len(order) // WRITTEN_ROWS + 1):
                write_copies(file, np.stack([starts[some], stops[some], firsts[some].view(np.int64)], axis=1))
    return target


def _draw(corpus: Corpus) -> tuple[int, Offsets, Offsets]:
    """(the number of windows, starts and stops of some), the latter evenly spread over the text."""
    stride = max(1, len(corpus.text) // _DRAWN)
    room = len(corpus.text) // stride + 1
    starts, stops = np.empty(room, np.int64), np.empty(room, np.int64)
    windows = suffix.draw(corpus.text, corpus.bounds, stride, corpus.length, corpus.unit, corpus.classes, starts, stops)
    drawn = -(-windows // stride)
    return windows, starts[:drawn], stops[:drawn]


def _collect(corpus: Corpus, task: RangeTask) -> tuple[Offsets, Offsets]:
    room = task.expected * 5 // 4 + 16
    while True:
        starts, stops = np.empty(room, np.int64), np.empty(room, np.int64)
        least, most = np.array(task.least, np.int64), np.array(task.most, np.int64)
        count = suffix.collect(
            *(corpus.text, corpus.bounds, least, most, corpus.length, corpus.unit, corpus.classes, starts, stops)
        )
        if count <= room:
            return starts[:count], stops[:count]
        room = count
