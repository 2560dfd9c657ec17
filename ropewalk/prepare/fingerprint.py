"""One pass over a file before it is read: the checksum of its bytes, and the parts in which it can be read.

Parts follow from the file alone, so that documents, their ids and their order are those of the whole file, whoever
reads which part: JSON lines between two ends of lines, Parquet by row groups.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

import xxhash

from .readers.item import Fault, Part
from .readers.streams import Readable

BLOCK_BYTES = 1 << 20
PART_BYTES = 2_000_000
"""A part of a file of JSON lines is about as large, or as many times larger as MOST_PARTS ask for."""
MOST_PARTS = 4000


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What one pass over a file tells."""

    bytes: int
    checksum: str
    """xxh3-128 of the content."""
    parts: tuple[Part, ...] = ()
    """Empty for a file that is read as a whole."""


def take_fingerprint(stream: Readable, *, lines: bool) -> Fingerprint:
    """Reads `stream` to its end; divides it when it is made of `lines`."""
    digest = xxhash.xxh3_128()
    marks = _Marks()
    size = 0
    while block := stream.read1(BLOCK_BYTES):
        digest.update(block)
        if lines:
            marks.pass_over(block)
        size += len(block)
    return Fingerprint(size, digest.hexdigest(), marks.parts(size) if lines else ())


def row_groups(stream: io.BufferedReader) -> tuple[Part, ...]:
    """The row groups of a Parquet file; none when it has only one, or is damaged."""
    from .readers.parquet import open_parquet  # brings pyarrow along, which checking a recipe does without

    try:
        meta = open_parquet(stream).metadata
    except Fault:
        return ()
    parts = []
    first = 1
    for index in range(meta.num_row_groups):
        group = meta.row_group(index)
        parts.append(Part(index, index + 1, first, max(0, group.total_byte_size)))
        first += max(0, group.num_rows)
    return tuple(parts) if len(parts) > 1 else ()


class _Marks:
    """Beginnings of lines, about PART_BYTES apart, and their numbers."""

    def __init__(self) -> None:
        self._found = [(0, 1)]
        self._place = 0
        self._lines = 0
        self._blank = True

    def pass_over(self, block: bytes) -> None:
        """Looks at the next block of the file."""
        self._blank = self._blank and block.isspace()
        while (wanted := self._found[-1][0] + PART_BYTES) <= self._place + len(block):
            end = block.find(b"\n", max(0, wanted - 1 - self._place))
            if end < 0:
                break
            number = self._lines + block.count(b"\n", 0, end + 1) + 1
            self._found.append((self._place + end + 1, number))
        self._place += len(block)
        self._lines += block.count(b"\n")

    def parts(self, size: int) -> tuple[Part, ...]:
        """The parts of a file of `size` bytes; none when it has only one, or no document."""
        starts = [mark for mark in self._found if mark[0] < size]
        starts = starts[:: max(1, -(-len(starts) // MOST_PARTS))]
        stops = [start for start, _ in starts[1:]] + [size] * bool(starts)
        found = [Part(start, stop, line, stop - start) for (start, line), stop in zip(starts, stops, strict=True)]
        return tuple(found) if len(found) > 1 and not self._blank else ()
