"""Documents in flight: Arrow batches with one row for every document that was read, text or not.

A document that is no text keeps its row, with an empty text and the rule that removed it, so that row i of every file
about a chunk speaks of the same document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .columns import Rows

BATCH_BYTES = 1 << 20
"""Text in one batch. While it is encoded, `tokenizers` 0.23 holds 84 bytes a token (measured on Python source, 3.2
bytes of text a token): 27 MB a batch in every worker, 88 MB if every byte were a token."""

EDITS = pa.list_(pa.struct([("rule", pa.string()), ("bytes", pa.int64())]))
"""The rules that changed a document's text, in the order in which they did, and how many bytes each took away."""

RECORDS = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
        ("url", pa.string()),
        ("time", pa.string()),
        ("licence", pa.string()),
        ("raw_bytes", pa.int64()),  # as read
        ("value", pa.float64()),  # of a fault that is a limit: what was measured
        ("threshold", pa.float64()),  # and the limit
    ]
)
"""What is known of a document before its text is looked at."""
DOCUMENTS = pa.schema(
    [
        *RECORDS,
        ("stage", pa.string()),  # the stage and rule that removed the document; null for one that goes on
        ("rule", pa.string()),
        ("edits", EDITS),
        ("text", pa.large_string()),
    ]
)


class Record(NamedTuple):
    """A document as it was found: raw text, or a fault that names why there is none."""

    id: str
    source: str
    domain: str
    data: bytes
    fault: str = ""
    url: str = ""
    time: str = ""
    licence: str = ""
    value: float | None = None
    """What was measured, for a fault that is a limit,"""
    threshold: float | None = None
    """and the limit."""
    doubtful: int = 0
    """Records right before it whose checksum turned out wrong."""


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes of texts, one entry a change: the document's row, the rule, the bytes it took away."""

    rows: Rows
    rules: npt.NDArray[np.object_]
    removed_bytes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rows: Rows, rule: str, removed_bytes: npt.NDArray[np.int64]) -> Edits:
        """The same rule for all `rows`."""
        return cls(rows, np.full(len(rows), rule, object), removed_bytes)

    @classmethod
    def joined(cls, parts: Sequence[Edits]) -> Edits:
        """All of `parts`, by row and then in the order given."""
        if not parts:
            return cls.of(np.zeros(0, np.int64), "", np.zeros(0, np.int64))
        rows = np.concatenate([part.rows for part in parts])
        order = np.argsort(rows, kind="stable")
        rules = np.concatenate([part.rules for part in parts])
        return cls(rows[order], rules[order], np.concatenate([part.removed_bytes for part in parts])[order])

    def column(self, documents: int) -> pa.ListArray:
        """The EDITS column of a batch of `documents`; `self` is in order of rows."""
        offsets = np.concatenate([[0], np.cumsum(np.bincount(self.rows, minlength=documents))])
        values = pa.StructArray.from_arrays(
            [pa.array(self.rules, pa.string()), pa.array(self.removed_bytes, pa.int64())], fields=list(EDITS.value_type)
        )
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=EDITS)


def edits_of(column: pa.ListArray) -> Edits:
    """What an EDITS column holds."""
    values = column.flatten()
    lengths = np.diff(column.offsets.to_numpy())
    rules = values.field("rule").to_numpy(zero_copy_only=False)
    return Edits(np.repeat(np.arange(len(column)), lengths), rules, values.field("bytes").to_numpy())


def batched(records: Iterable[Record], *, limit_bytes: int = BATCH_BYTES) -> Iterator[list[Record]]:
    """`records` in runs of about `limit_bytes`; a longer document is a run of its own."""
    run: list[Record] = []
    size = 0
    for record in records:
        if run and size + len(record.data) > limit_bytes:
            yield run
            run, size = [], 0
        run.append(record)
        size += len(record.data) + 100
    if run:
        yield run
