"""Repeated spans: where they lie, where their bytes stay, and what is done with them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ropewalk.base.errors import DamagedFile
from ropewalk.store.sealed import read_content

from ..columns import Offsets, Rows
from ..kernels import spans as kernels
from .copies import merged
from .corpus import Corpus, seal_name, sealed_file

_log = logging.getLogger(__name__)

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
    with sealed_file(folder / _DOCUMENTS) as file:
        pq.write_table(found.documents, file)
    # The spans come last: with them the result is whole.
    with sealed_file(folder / _SPANS) as file:
        pq.write_table(found.spans, file)
    return found


def read_repeats(folder: Path) -> Repeats | None:
    """What `settle` committed to `folder`; None when there is nothing or, with a warning, when it is damaged."""
    if not (folder / _SPANS).exists():
        return None
    try:
        return Repeats(*(_read(folder / name) for name in (_SPANS, _DOCUMENTS)))
    except DamagedFile as error:
        _log.warning("%s; the repeated spans are looked for again", error)
        return None


def _read(path: Path) -> pa.Table:
    return pq.read_table(pa.BufferReader(read_content(path, seal_name(path))))


def _repeats(bounds: Offsets, spans: Rows) -> Repeats:
    start, stop, kept = spans.T
    document, kept_document = (np.searchsorted(bounds, at, side="right") - 1 for at in (start, kept))
    columns = (document, start - bounds[document], stop - bounds[document])
    kept_columns = (kept_document, kept - bounds[kept_document])
    repeated = np.bincount(document, stop - start, len(bounds) - 1).astype(np.int64)
    return Repeats(
        pa.table([*columns, *kept_columns], schema=SPANS), pa.table([np.diff(bounds), repeated], schema=DOCUMENTS)
    )
