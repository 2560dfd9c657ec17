"""Keys and sets on disk: Arrow files that name the algorithm they were made by, read by memory map without a copy."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file, storage

from ..config import Near
from ..kernels.words import Hashes
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
    write_table(path, pa.table([pa.array(band) for band in sketch.keys], names), near)


def open_sketch(path: Path, near: Near) -> StoredSketch:
    """A committed sketch; refuses one that was made by another algorithm."""
    return StoredSketch(path, len(open_table(path, near, what="sketch")))


def write_sets(path: Path, sets: Sets, near: Near) -> None:
    """Commits the sets of a chunk's candidates."""
    shingles = pa.LargeListArray.from_arrays(pa.array(sets.bounds), pa.array(sets.values))
    write_table(path, pa.table({"shingles": shingles}), near)


def open_sets(path: Path, near: Near) -> Sets:
    """Committed sets, mapped; refuses those that were made by another algorithm."""
    return sets_of(open_table(path, near, what="file of shingle sets")["shingles"])


def sets_of(column: pa.ChunkedArray) -> Sets:
    """A list column as sets."""
    lists = column.combine_chunks()
    return Sets(lists.values.to_numpy(), lists.offsets.to_numpy())


def write_table(path: Path, table: pa.Table, near: Near) -> None:
    """Commits `table` as one Arrow file of one batch, with the algorithm's name."""
    table = table.replace_schema_metadata({_ALGORITHM: algorithm(near).encode()})
    with committed_file(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def open_table(path: Path, near: Near, *, what: str) -> pa.Table:
    """The table in `path`, mapped into memory; `what` names the file in errors."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except FileNotFoundError:
        raise DataError(f"{path}: no such {what}") from None
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: this {what} is damaged: {error}; remove it and prepare again") from None
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


def _column(path: Path, number: int) -> Hashes:
    with pa.memory_map(str(path)) as source:
        column = pa.ipc.open_file(source).read_all().column(number)
        keys: Hashes = column.chunk(0).to_numpy() if column.num_chunks else np.empty(0, np.uint64)
    return keys
