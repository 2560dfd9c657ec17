"""All documents at once, without their texts: what the stages that compare documents work on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from .chunks import Chunk
from .columns import Mask, Rows
from .documents import edits_of
from .fates import Fates, Removal
from .normalise import STAGE as NORMALISE
from .screen import COLLECT
from .stages import read_table

Value = TypeVar("Value", bound=np.generic)

_READ = ["id", "source", "raw_bytes", "value", "threshold", "stage", "rule", "edits"]
_FOUND = ["bytes", "hash"]
_CORRECTED = "corrections"

CORRECT = "correct"
BEFORE_RULES = (COLLECT, NORMALISE, CORRECT)
"""The stages that look at each document alone; what they remove has no statistics worth judging."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The documents of all chunks in canonical order."""

    chunks: Sequence[Chunk]
    starts: Rows
    """The first row of each chunk, and the number of all rows at the end."""
    table: pa.Table
    """What was read, and of the text after corrections its `bytes`, its `hash` and the `corrections`."""

    def __len__(self) -> int:
        return len(self.table)

    @property
    def ids(self) -> pa.StringArray:
        """The id of each document."""
        return self.table["id"].combine_chunks()

    @property
    def hashes(self) -> pa.FixedSizeBinaryArray:
        """The hash of each text."""
        return self.table["hash"].combine_chunks()

    def by_chunk(self, column: npt.NDArray[Value]) -> list[npt.NDArray[Value]]:
        """A column over all documents as one array a chunk."""
        return np.split(column, self.starts[1:-1])

    def bytes_by_chunk(self, sizes: npt.NDArray[np.int64], mask: Mask) -> list[int]:
        """The sum of `sizes` where `mask`, for each chunk."""
        return [int(size[chosen].sum()) for size, chosen in zip(self.by_chunk(sizes), self.by_chunk(mask), strict=True)]


def read_corpus(chunks: Sequence[Chunk]) -> Corpus:
    """The documents of `chunks`, which have been read and measured."""
    tables = []
    for chunk in chunks:
        columns: dict[str, pa.ChunkedArray] = {_CORRECTED: read_table(chunk.measured, ["edits"])["edits"]}
        for path, names in ((chunk.documents, _READ), (chunk.measured, _FOUND)):
            table = read_table(path, names)
            columns |= {name: table[name] for name in names}
        tables.append(pa.table(columns))
    lengths = [len(table) for table in tables]
    return Corpus(chunks, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.concat_tables(tables))


def first_fates(corpus: Corpus, *, sources: Sequence[str], corrected: bool) -> Fates:
    """What reading, normalising and, where there were any, corrections did."""
    table = corpus.table
    names = table["source"].combine_chunks().dictionary_encode()
    codes = np.array([sources.index(name) for name in names.dictionary.to_pylist()], np.int64)
    raw_bytes, final = table["raw_bytes"].to_numpy(), table["bytes"].to_numpy()
    corrections = edits_of(table[_CORRECTED].combine_chunks())
    fates = Fates(source=codes[names.indices.to_numpy()], sources=sources, sizes=raw_bytes)
    fates.close(COLLECT, removals=[_removed_in(COLLECT, table)])
    removal = _removed_in(NORMALISE, table)
    stays = fates.left.copy()
    stays[removal.rows] = False
    normalised = final + np.bincount(corrections.rows, corrections.removed_bytes, len(table)).astype(np.int64)
    edits = [edits_of(table["edits"].combine_chunks())]
    fates.close(NORMALISE, removals=[removal], edits=edits, sizes=np.where(stays, normalised, raw_bytes))
    if corrected:
        empty = np.flatnonzero(stays & (final == 0))
        stays[empty] = False
        gone = Removal(rows=empty, rule="empty")
        fates.close(CORRECT, removals=[gone], edits=[corrections], sizes=np.where(stays, final, fates.sizes))
    return fates


def _removed_in(stage: str, table: pa.Table) -> Removal:
    rows = np.flatnonzero(np.asarray(pc.fill_null(pc.equal(table["stage"], stage), False)))
    gone = table.select(["rule", "value", "threshold"]).take(pa.array(rows)).combine_chunks()
    rule, value, threshold = (column.combine_chunks() for column in gone.columns)
    return Removal(rows=rows, rule=rule, value=value, threshold=threshold)
