"""Repeated spans: where they lie, where their bytes stay, and what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ropewalk.base.files import committed_file

from ..columns import Offsets, Rows, text_buffers
from ..kernels import spans as kernels
from .copies import merged
from .corpus import Corpus

SPANS = pa.schema(
    [
        ("document", pa.int64()),  # its place in canonical order
        ("start", pa.int64()),  # bytes from the start of the document; always between two characters
        ("stop", pa.int64()),
        ("kept_document", pa.int64()),  # the same bytes stay here
        ("kept_start", pa.int64()),
    ]
)
DOCUMENTS = pa.schema(
    [
        ("bytes", pa.int64()),
        ("repeated_bytes", pa.int64()),
    ]
)
_SPANS, _DOCUMENTS = "spans.parquet", "documents.parquet"
STEP_BYTES = 4 << 20
"""Text that is settled at a time; its copies are in memory."""
ROOM = 1 << 16
"""Spans that there is room for at first."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """What is repeated in a corpus."""

    spans: pa.Table
    """Rows of SPANS, by document and start. Spans of a document do not overlap; they may touch."""
    documents: pa.Table
    """A row of DOCUMENTS for every document."""

    def of(self, first: int, count: int) -> pa.Table:
        """The spans of documents `first` to `first + count`, counted from `first`: those of one batch or chunk."""
        documents = self.spans["document"].to_numpy()
        begin, end = np.searchsorted(documents, [first, first + count])
        rows = self.spans.slice(begin, end - begin)
        return rows.set_column(0, SPANS.field(0), pa.array(documents[begin:end] - first))

    def short(self, min_left_bytes: int) -> Rows:
        """The documents of which repeats leave fewer than `min_left_bytes`."""
        size, repeated = (self.documents[name].to_numpy() for name in DOCUMENTS.names)
        return np.flatnonzero((repeated > 0) & (size - repeated < min_left_bytes))

    def shares(self, sources: pa.Array) -> pa.Table:
        """For each value of `sources`, one a document: documents, bytes, those with repeats, and repeated_share."""
        table = self.documents.append_column("source", sources)
        touched = pa.array(table["repeated_bytes"].to_numpy() > 0).cast(pa.int64())
        sums = (
            table.append_column("repeated_documents", touched)
            .group_by("source")
            .aggregate([("bytes", "count"), ("bytes", "sum"), ("repeated_documents", "sum"), ("repeated_bytes", "sum")])
        )
        names = ["source", "documents", "bytes", "repeated_documents", "repeated_bytes"]
        found = sums.select(
            ["source", "bytes_count", "bytes_sum", "repeated_documents_sum", "repeated_bytes_sum"]
        ).rename_columns(names)
        share = found["repeated_bytes"].to_numpy() / np.maximum(found["bytes"].to_numpy(), 1)
        return found.append_column("repeated_share", pa.array(share)).sort_by("source")


def remove(text: pa.LargeStringArray, spans: pa.Table) -> pa.LargeStringArray:
    """`text` without `spans`, whose documents count from the first of `text`."""
    data, offsets = text_buffers(text)
    documents, starts, stops = (spans[name].to_numpy() for name in SPANS.names[:3])
    bounds = np.searchsorted(documents, np.arange(len(text) + 1))
    out = np.empty(offsets[-1] - offsets[0] - (stops - starts).sum(), np.uint8)
    places = kernels.cut(data, offsets, bounds, starts, stops, out)
    return pa.LargeStringArray.from_buffers(len(text), pa.py_buffer(places), pa.py_buffer(out))


def join(spans: pa.Table) -> pa.Table:
    """(document, start, stop) of stretches of text: touching spans become one. A mask needs no more."""
    documents, starts, stops = (spans[name].to_numpy() for name in SPANS.names[:3])
    joined = (documents[1:] == documents[:-1]) & (starts[1:] == stops[:-1])
    first, last = np.append(True, ~joined)[: len(starts)], np.append(~joined, True)[: len(starts)]
    return pa.table({"document": documents[first], "start": starts[first], "stop": stops[last]})


def settle(corpus: Corpus, copies: Sequence[Path], *, folder: Path) -> Repeats:
    """Commits the spans that `copies` cover to `folder`."""
    spans, count, at = np.empty((ROOM, 3), np.int64), 0, 0
    last = np.empty((0, 3), np.int64)
    regions = corpus.regions(STEP_BYTES)
    for (_, end), some in zip(regions, merged(copies, regions), strict=True):
        rows, index = np.concatenate([last, some]), 0
        while True:
            index, at, count = kernels.settle(corpus.text, corpus.bounds, rows, index, at, end, spans, count)
            if count < len(spans):
                break
            spans = np.concatenate([spans, np.empty_like(spans)])
        last = rows[-1:]  # it reaches furthest, perhaps beyond `end`
    found = _repeats(corpus.bounds, spans[:count])
    with committed_file(folder / _DOCUMENTS) as file:
        pq.write_table(found.documents, file)
    # The spans come last: with them the result is whole.
    with committed_file(folder / _SPANS) as file:
        pq.write_table(found.spans, file)
    return found


def read_repeats(folder: Path) -> Repeats | None:
    """What `settle` committed to `folder`, or None."""
    if not (folder / _SPANS).exists():
        return None
    return Repeats(pq.read_table(folder / _SPANS), pq.read_table(folder / _DOCUMENTS))


def _repeats(bounds: Offsets, spans: Rows) -> Repeats:
    start, stop, kept = spans.T
    document, kept_document = (np.searchsorted(bounds, at, side="right") - 1 for at in (start, kept))
    columns = (document, start - bounds[document], stop - bounds[document])
    kept_columns = (kept_document, kept - bounds[kept_document])
    repeated = np.bincount(document, stop - start, len(bounds) - 1).astype(np.int64)
    return Repeats(
        pa.table([*columns, *kept_columns], schema=SPANS), pa.table([np.diff(bounds), repeated], schema=DOCUMENTS)
    )
