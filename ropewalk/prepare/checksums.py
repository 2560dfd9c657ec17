"""Checksums of input files, remembered between runs: a file that has not been touched is not read for its name.

A file is taken for untouched when size, time of modification, time of change and inode are those of the last time. The
time of change is the kernel's and cannot be set back by `touch` or `cp -p`. A file that had changed less than
SETTLED_NS before it was hashed is hashed again: it may have changed once more within the grain of the clock.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from ropewalk.base.errors import DataError

from .fingerprint import take_fingerprint
from .readers.item import Part
from .stages import DamagedArtifact, batch_writer, drop_artifact, read_batches

_log = logging.getLogger(__name__)

SETTLED_NS = 2_000_000_000
"""The coarsest clock of a file system in use (FAT)."""

_SCHEMA = pa.schema(
    [
        ("location", pa.binary()),  # a path need not be UTF-8
        ("bytes", pa.int64()),
        ("modified_ns", pa.int64()),
        ("changed_ns", pa.int64()),
        ("inode", pa.uint64()),
        ("checksum", pa.string()),
        ("lines", pa.bool_()),
        ("parts", pa.list_(pa.list_(pa.int64(), len(Part._fields)))),
    ]
)


class Hashed(NamedTuple):
    """A file as it was when it was hashed."""

    bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    checksum: str
    """xxh3-128 of the content."""
    lines: bool
    """Whether it was divided between lines."""
    parts: tuple[Part, ...]


class Checksums:
    """The checksums kept in `path`, and those found since."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[bytes, Hashed] = {}
        self._found: dict[bytes, Hashed] = {}
        if path is not None and path.exists():
            try:
                self._known = _read(path)
            except DamagedArtifact as error:
                _log.warning("%s; it is made again: all input files are read", error)
                drop_artifact(path)

    def of(self, location: str | Path, *, lines: bool = False) -> Hashed:
        """The file as it is now, divided when it is made of `lines`; reads it only if it was touched.

        OSError when it cannot be read, DataError for what is no regular file.
        """
        place = os.fsencode(os.path.abspath(location))
        known = self._known.get(place)
        if known is not None and known.lines == lines and known[:4] == _described(os.stat(place)):
            return known
        with open(place, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{location} is not a regular file; leave it out")
            taken = take_fingerprint(file, lines=lines)
        hashed = Hashed(*_described(status), taken.checksum, lines, taken.parts)
        if max(hashed.modified_ns, hashed.changed_ns) + SETTLED_NS < time.time_ns():
            self._found[place] = hashed
        return hashed

    def save(self) -> None:
        """Keeps what was found for the next time."""
        if self._path is None or not self._found:
            return
        self._known.update(self._found)
        rows = [(location, *hashed) for location, hashed in sorted(self._known.items())]
        columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), _SCHEMA.types, strict=True)]
        with batch_writer(self._path, _SCHEMA) as writer:
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
        self._found.clear()


def _read(path: Path) -> dict[bytes, Hashed]:
    known = {}
    for batch in read_batches(path):
        columns = (column.to_pylist() for column in batch.columns)
        for location, *rest, parts in zip(*columns, strict=True):
            known[os.fsencode(location)] = Hashed._make([*rest, tuple(Part(*part) for part in parts)])
    return known


def _described(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
