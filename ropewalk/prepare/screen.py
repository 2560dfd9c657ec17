"""The first half of prepare, chunk by chunk: read, normalise, filter. Each chunk ends as two committed files.

work/00000.documents.parquet   the documents that stay: id, source, domain, text
work/00000.screened.parquet    one row for every document that was read; committed last, it ends the chunk
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ropewalk.base.files import committed_file

from .config import Filter
from .documents import TEXT_SCHEMA, Batch, Block, Record, Removal, batched, raw_batch
from .filters import filter_block
from .normalise import normalise
from .read import read_records
from .sources import InputFile

COLLECT = "collect"

SCREENED = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("raw_bytes", pa.int64()),  # as read
        ("bytes", pa.int64()),  # after normalise; as read for a document that did not get so far
        ("step", pa.string()),  # step, rule, value, threshold: of the removal; null for a document that stays
        ("rule", pa.string()),
        ("value", pa.float64()),
        ("threshold", pa.float64()),
        ("edit", pa.string()),  # the rule that changed the text
        ("hash", pa.binary(16)),  # xxh3-128 of the text; null for a document that was removed
    ]
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Input files that one worker takes through the first half of prepare."""

    index: int
    files: tuple[InputFile, ...]
    work: Path
    filter: Filter

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(file.bytes for file in self.files)

    @property
    def done(self) -> bool:
        """Whether an earlier attempt has committed this chunk."""
        return screened_path(self.work, self.index).exists()


def divide(files: Sequence[InputFile], *, work: Path, filter: Filter, limit_bytes: int) -> list[Chunk]:
    """`files` in order, in chunks of at most `limit_bytes`; a larger file is a chunk of its own."""
    runs: list[list[InputFile]] = []
    room = 0
    for file in files:
        if not runs or file.bytes > room:
            runs.append([])
            room = limit_bytes
        runs[-1].append(file)
        room -= file.bytes
    return [Chunk(index, tuple(run), work, filter) for index, run in enumerate(runs)]


def screen(chunk: Chunk) -> Chunk:
    """Reads, normalises and filters a chunk, and commits what stays and what became of each document."""
    blocks = [filter_block(chunk.filter)]
    records = (record for file in chunk.files for record in read_records(file))
    tables = [SCREENED.empty_table()]
    with (
        committed_file(documents_path(chunk.work, chunk.index)) as file,
        pq.ParquetWriter(file, TEXT_SCHEMA) as writer,
    ):
        for run in batched(records):
            batch, table = screen_records(run, blocks)
            writer.write_batch(batch)
            tables.append(table)
    with committed_file(screened_path(chunk.work, chunk.index)) as file:
        pq.write_table(pa.concat_tables(tables), file)
    return chunk


def screen_records(records: Sequence[Record], blocks: Sequence[Block]) -> tuple[Batch, pa.Table]:
    """`records` normalised and taken through `blocks`: what stays, and a SCREENED row for every record."""
    removals = {record.id: Removal(record.id, COLLECT, record.fault) for record in records if record.fault}
    passed = normalise(raw_batch(records))
    removals.update((removal.id, removal) for removal in passed.removed)
    edits = dict(passed.edited)
    texts = _sizes_and_hashes(passed.batch)
    for block in blocks:
        passed = block(passed.batch)
        removals.update((removal.id, removal) for removal in passed.removed)
        edits.update(passed.edited)
    rows = [_row(record, removals.get(record.id), edits.get(record.id), texts.get(record.id)) for record in records]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), SCREENED.types, strict=True)]
    return passed.batch, pa.table(columns, schema=SCREENED)


def read_screened(work: Path, chunks: int) -> pa.Table:
    """The rows of all chunks in canonical order, with the column `chunk`."""
    tables = [SCREENED.empty_table().append_column("chunk", pa.array([], pa.int64()))]
    for index in range(chunks):
        table = pq.read_table(screened_path(work, index))
        tables.append(table.append_column("chunk", pa.array(np.full(len(table), index), pa.int64())))
    return pa.concat_tables(tables).combine_chunks()


def read_documents(work: Path, index: int, wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[list[str], list[str]]]:
    """(ids, texts) of the wanted documents of chunk `index`, batch by batch."""
    position = 0
    with pq.ParquetFile(documents_path(work, index)) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["id", "text"])
            mask = wanted[position : position + len(table)]
            position += len(table)
            if mask.any():
                chosen = table.filter(pa.array(mask))
                yield chosen["id"].to_pylist(), chosen["text"].to_pylist()


def documents_path(work: Path, index: int) -> Path:
    """Where chunk `index` keeps the documents that stay."""
    return work / f"{index:05d}.documents.parquet"


def screened_path(work: Path, index: int) -> Path:
    """Where chunk `index` keeps one row for every document."""
    return work / f"{index:05d}.screened.parquet"


def _sizes_and_hashes(batch: Batch) -> dict[str, tuple[int, bytes]]:
    found = {}
    for name, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True):
        data = text.encode()
        found[name] = (len(data), xxhash.xxh3_128_digest(data))
    return found


def _row(
    record: Record, removal: Removal | None, edit: str | None, text: tuple[int, bytes] | None
) -> tuple[object, ...]:
    size, digest = text or (len(record.data), None)
    head = (record.id, record.source, len(record.data), size)
    if removal:
        return (*head, removal.step, removal.rule, removal.value, removal.threshold, edit, None)
    return (*head, None, None, None, None, edit, digest)
