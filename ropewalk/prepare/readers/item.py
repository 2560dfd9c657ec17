"""What a reader is given and what it gives: bytes to read as one file, documents and faults.

A reader is a function `Input -> Iterator[Item]`. It yields a document, or a fault for one that cannot be had, and goes
on; it raises `Fault` when nothing more can be had of the file. So every byte of an input ends in an item.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..config import Source
from ..formats import Reader


class Item(NamedTuple):
    """A document as a reader finds it: its bytes, or a fault that names why there is no text."""

    suffix: str = ""
    """What its id adds to the name of the file: `:12` for the twelfth line, `!a.txt` for a member of an archive."""
    data: bytes = b""
    fault: str = ""
    value: float | None = None
    threshold: float | None = None
    url: str = ""
    time: str = ""
    licence: str = ""
    doubtful: int = 0
    """Items right before it that its fault makes doubtful: they were read, and their checksum turned out wrong."""


class Fault(Exception):
    """Why a document, or the rest of a file, cannot be had; `value` and `threshold` when it is a limit."""

    def __init__(self, rule: str, *, value: float | None = None, threshold: float | None = None) -> None:
        super().__init__(rule)
        self.rule, self.value, self.threshold = rule, value, threshold

    def item(self, suffix: str, data: bytes = b"") -> Item:
        """The fault as the item of one document."""
        return Item(suffix, data, self.rule, self.value, self.threshold)


class Exhausted(Fault):
    """The file has unpacked to more than it may: nothing more of it is read, at any level of nesting."""


FREE_BYTES = 256_000_000
"""Unpacked bytes that are never too many, however small the file."""


class Budget:
    """How much a file may still unpack to, in all its layers and members together."""

    def __init__(self, packed_bytes: int, *, expansion: float) -> None:
        self._limit = FREE_BYTES + expansion * packed_bytes
        self._spent = 0

    def spend(self, count: int) -> None:
        """Counts unpacked bytes; raises Exhausted when they are too many."""
        self._spent += count
        if self._spent > self._limit:
            raise Exhausted("expansion", value=self._spent, threshold=self._limit)


class Part(NamedTuple):
    """A piece of a large file that is read alone: bytes between two ends of lines, or one row group."""

    start: int
    """First byte of JSON lines, number of the row group of Parquet."""
    stop: int
    first: int
    """Number of the first line or row, counted from 1."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """Bytes to read as one file: a file, a part of one, or a member of an archive."""

    stream: io.BufferedReader
    reader: Reader
    settings: Source
    budget: Budget
    name: str = ""
    """Name of the file without the ending of its compression."""
    part: Part | None = None
    depth: int = 0
    """Archives around it."""

    @property
    def limit(self) -> int:
        """Most bytes of a document."""
        return self.settings.limits.document_bytes


ReaderFunction: TypeAlias = Callable[[Input], Iterator[Item]]

KEPT_BYTES = 1000
"""What is kept of a document that is too large, to recognise it by."""
