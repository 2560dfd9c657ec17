"""Keys and sets on disk: Arrow files that name the algorithm they were made by, read by memory map without a copy."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa

from ropewalk.base.errors import DataError
from ropewalk.base.files import storage

from ..config import Near
from ..kernels.words import Hashes
from ..stages import filled, open_content
from .sketch import Sets, Sketch, algorithm

_ALGORITHM = b"algorithm"


@dataclass(frozen=True, slots=True)
class StoredSketch:
    """A sketch that lies in a file; a band is read when it is asked for."""

    path: Path
    documents: int

    def band(self, number: int) -> Hashes:
        """The keys of one band."""
        return _column(self.path, number)


def write_sketch(path: Path, sketch: Sketch, near: Near) -> None:
    """Commits the keys of a chunk."""
    names = [f"key_{band:03}" for band in range(len(sketch.keys))]
    _commit(path, pa.table([pa.array(band) for band in sketch.keys], names), near)


def open_sketch(path: Path, near: Near) -> StoredSketch:
    """A committed sketch; refuses one that was made by another algorithm."""
    return StoredSketch(path, len(table_in(open_content(path), near, path=path, what="sketch")))


def write_sets(path: Path, sets: Sets, near: Near) -> None:
    """Commits the sets of a chunk's candidates."""
    shingles = pa.LargeListArray.from_arrays(pa.array(sets.bounds), pa.array(sets.values))
    _commit(path, pa.table({"shingles": shingles}), near)


def open_sets(path: Path, near: Near) -> Sets:
    """Committed sets, mapped; refuses those that were made by another algorithm."""
    return sets_of(table_in(open_content(path), near, path=path, what="file of shingle sets")["shingles"])


def sets_of(column: pa.ChunkedArray) -> Sets:
    """A list column as sets."""
    lists = column.combine_chunks()
    return Sets(lists.values.to_numpy(), lists.offsets.to_numpy())


def write_table(file: IO[bytes], table: pa.Table, near: Near) -> None:
    """Writes `table` as one Arrow file of one batch, with the algorithm's name."""
    table = table.replace_schema_metadata({_ALGORITHM: algorithm(near).encode()})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def table_in(content: pa.NativeFile, near: Near, *, path: Path, what: str) -> pa.Table:
    """The table in the verified content of `path`; `what` names the file in errors."""
    table = pa.ipc.open_file(content).read_all()
    found = (table.schema.metadata or {}).get(_ALGORITHM, b"").decode()
    if found != algorithm(near):
        raise DataError(
            f'{path}: this {what} was made by "{found}", these settings need "{algorithm(near)}"; '
            "change `deduplicate.near` back, or make it anew"
        )
    return table


def joined(parts: Sequence[Sets], *, memory_bytes: int, scratch: Path | None) -> Sets:
    """All sets in one array: in memory when they fit, else in a nameless file of folder `scratch`, mapped."""
    sizes = [part.bounds[-1] - part.bounds[0] for part in parts]
    edges = np.cumsum([0, *sizes])
    lengths = [np.diff(part.bounds) for part in parts]
    values: Hashes
    if edges[-1] * 8 <= memory_bytes:
        values = np.empty(edges[-1], np.uint64)
    else:
        with storage(f"writing shingle sets below {scratch}"), tempfile.TemporaryFile(dir=scratch) as file:
            values = np.memmap(file, np.uint64, "w+", shape=(int(edges[-1]),))
    for part, begin, end in zip(parts, edges[:-1], edges[1:], strict=True):
        values[begin:end] = part.values[part.bounds[0] : part.bounds[-1]]
    return Sets(values, np.concatenate([[0], *lengths]).cumsum().astype(np.int64))


def _commit(path: Path, table: pa.Table, near: Near) -> None:
    with filled(path) as place, open(place, "wb") as file:
        write_table(file, table, near)


def _column(path: Path, number: int) -> Hashes:
    column = pa.ipc.open_file(open_content(path)).read_all().column(number)
    keys: Hashes = column.chunk(0).to_numpy() if column.num_chunks else np.empty(0, np.uint64)
    return keys
