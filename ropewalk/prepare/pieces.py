"""Lines and paragraphs that occurred before, in any document: the first in canonical order stays.

Each chunk gives its pieces, sorted by hash. These files are merged by ranges of hashes, so that memory is bounded
however many pieces there are. Hashes have 64 bits: among 100 million different pieces, the chance that any two are
mistaken for each other is 0.03 %.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .columns import Mask, Rows, text_buffers
from .cuts import Spans
from .kernels.pieces import PIECES_ID, find_pieces
from .stages import batch_writer, key_of, read_batches
from .texts import Texts, read_texts

Piece = Literal["paragraphs", "lines"]

PIECES = pa.schema([("hash", pa.uint64()), ("row", pa.int64()), ("start", pa.int64()), ("stop", pa.int64())])
"""In order of hashes, and of the text where these are equal. `row` counts within the chunk."""

MERGED = 16_000_000
"""Pieces merged at a time; each takes 60 bytes on the way."""


@dataclass(frozen=True, slots=True)
class PieceTask:
    """The documents of one chunk whose pieces are compared."""

    texts: Texts
    wanted: Mask
    bytes: int
    kind: Piece
    least: int
    target: Path

    @property
    def made(self) -> tuple[Path, ...]:
        """What is committed."""
        return (self.target,)


def piece_key(texts: str, *, kind: Piece, least: int) -> str:
    """The name of the pieces of the `texts` so named."""
    return key_of(PIECES_ID, texts, kind, least)


def list_pieces(task: PieceTask) -> int:
    """Commits the pieces of one chunk; the number of its documents."""
    found = [PIECES.empty_table()]
    position = 0
    for batch in read_texts(task.texts, ["text"]):
        data, offsets = text_buffers(batch["text"])
        mask = task.wanted[position : position + len(batch)]
        hashes, rows, starts, stops = find_pieces(data, offsets, mask, task.kind == "paragraphs", task.least)
        found.append(pa.table([hashes, rows + position, starts, stops], schema=PIECES))
        position += len(batch)
    table = pa.concat_tables(found).combine_chunks()
    order = np.argsort(table["hash"].to_numpy(), kind="stable")
    with batch_writer(task.target, PIECES, compressed=False) as writer:
        writer.write_table(table.take(pa.array(order)).combine_chunks(), max_chunksize=max(1, len(table)))
    return int(task.wanted.sum())


def repeated(files: Sequence[Path], *, starts: Rows) -> Spans:
    """The pieces that an earlier one equals, as spans of documents; `starts` are the first rows of the chunks."""
    batches = [next(iter(read_batches(path)), None) for path in files]
    total = sum(len(batch) for batch in batches if batch)
    borders = np.linspace(0, 2.0**64, -(-total // MERGED) + 1) if total else np.zeros(1)
    found = [Spans.none()]
    for low, high in itertools.pairwise(borders.tolist()):
        parts = [_between(batch, low, high, first) for batch, first in zip(batches, starts, strict=False) if batch]
        hashes, rows, begin, end = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(hashes, kind="stable")
        again = order[1:][hashes[order][1:] == hashes[order][:-1]]
        found.append(Spans(rows[again], begin[again], end[again]))
    return Spans.joined(found)


def _between(
    batch: pa.RecordBatch, low: float, high: float, first: int
) -> tuple[npt.NDArray[np.uint64], Rows, Rows, Rows]:
    """The pieces of a chunk whose hashes are at least `low` and below `high`, rows counted over all chunks."""
    hashes, rows, starts, stops = (column.to_numpy() for column in batch.columns)
    begin = 0 if low <= 0 else np.searchsorted(hashes, np.uint64(int(low)))
    end = len(hashes) if high >= 2.0**64 else np.searchsorted(hashes, np.uint64(int(high)))
    return hashes[begin:end], rows[begin:end] + first, starts[begin:end], stops[begin:end]
