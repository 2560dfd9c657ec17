"""The part of prepare that looks at each document alone, chunk by chunk: read, normalise, correct, measure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from . import normalise
from .chunks import Chunk
from .config import Filter
from .documents import DOCUMENTS, RECORDS, Record, batched
from .measures import measure
from .read import read_records
from .stages import batch_writer, read_batches
from .texts import LAYER

COLLECT = "collect"


@dataclass(frozen=True, slots=True)
class ReadTask:
    """A chunk to read and normalise."""

    chunk: Chunk

    @property
    def bytes(self) -> int:
        return self.chunk.bytes

    @property
    def made(self) -> tuple[Path, ...]:
        """What is committed."""
        return (self.chunk.documents,)


@dataclass(frozen=True, slots=True)
class MeasureTask:
    """A chunk to correct and measure, after it was read."""

    chunk: Chunk
    filter: Filter
    uncut: frozenset[str]
    """Sources whose texts are not corrected."""

    @property
    def bytes(self) -> int:
        return self.chunk.bytes

    @property
    def made(self) -> tuple[Path, ...]:
        """What is committed."""
        return (self.chunk.measured, *self.chunk.texts.layers)


def read_chunk(task: ReadTask) -> int:
    """Commits the documents of a chunk; their number.

    A wrong checksum is known only after the documents that it covers: then the chunk is read once more, without them.
    """
    try:
        return _commit(task.chunk, doubtful=())
    except _DoubtError as found:
        return _commit(task.chunk, doubtful=found.rows)


class _DoubtError(Exception):
    """Some documents of a chunk have a wrong checksum."""

    def __init__(self, rows: Sequence[range]) -> None:
        super().__init__()
        self.rows = rows


def _commit(chunk: Chunk, *, doubtful: Sequence[range]) -> int:
    documents = 0
    with batch_writer(chunk.documents, DOCUMENTS) as writer:
        for run in batched(_records(chunk, doubtful=doubtful)):
            writer.write_batch(document_batch(run))
            documents += len(run)
    return documents


def _records(chunk: Chunk, *, doubtful: Sequence[range]) -> Iterator[Record]:
    """The records of a chunk, with a fault in `doubtful` rows; _DoubtError at the end when it should be in others."""
    found = []
    for row, record in enumerate(record for file in chunk.files for record in read_records(file)):
        if record.doubtful:
            found.append(range(row - record.doubtful, row))
        wrong = any(row in rows for rows in doubtful)
        yield record._replace(fault="checksum") if wrong else record
    if found != list(doubtful):
        raise _DoubtError(found)


def measure_chunk(task: MeasureTask) -> int:
    """Commits the statistics of a chunk, and its corrected texts where there are any; the number of documents."""
    chunk, documents = task.chunk, 0
    # Every batch has the same columns, so one without rows tells them.
    columns = measure(pa.RecordBatch.from_pylist([], DOCUMENTS), task.filter).columns.schema
    with contextlib.ExitStack() as stack:
        measured = stack.enter_context(batch_writer(chunk.measured, columns))
        corrected = stack.enter_context(batch_writer(chunk.corrected, LAYER)) if chunk.corrected else None
        for batch in read_batches(chunk.documents, ["source", "url", "text"]):
            found = measure(batch, task.filter, uncut=task.uncut)
            measured.write_batch(found.columns)
            if corrected:
                corrected.write_batch(found.layer)
            documents += len(batch)
    return documents


def document_batch(records: Sequence[Record]) -> pa.RecordBatch:
    """`records` as a DOCUMENTS batch: normalised, and those that are no text marked with stage and rule."""
    fault = pa.array([record.fault or None for record in records], pa.string())
    raw = pa.array([b"" if record.fault else record.data for record in records], pa.large_binary())
    found = normalise.normalise(raw)
    rule = pc.coalesce(fault, found.rule)
    names = np.where(fault.is_valid(), COLLECT, normalise.STAGE)
    stage = pa.array(names, pa.string(), mask=np.asarray(rule.is_null()))
    columns = [
        [record.id for record in records],
        [record.source for record in records],
        [record.domain for record in records],
        [record.url for record in records],
        [record.time for record in records],
        [record.licence for record in records],
        [len(record.data) for record in records],
        [record.value for record in records],
        [record.threshold for record in records],
    ]
    described = [pa.array(column, kind) for column, kind in zip(columns, RECORDS.types, strict=True)]
    edits = found.edits.column(len(records))
    return pa.record_batch([*described, stage, rule, edits, found.text], schema=DOCUMENTS)
