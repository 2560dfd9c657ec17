"""Documents in flight: Arrow batches, and the rows that a block leaves behind for those it removes or edits.

A block is a function `Batch -> Passed`. Batches have the columns id, source, domain and text (UTF-8 as
large_string; raw bytes as large_binary until `normalise`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import pyarrow as pa

Batch: TypeAlias = pa.RecordBatch

BATCH_BYTES = 1 << 20
"""Text in one batch. While it is encoded, `tokenizers` 0.23 holds 84 bytes a token (measured on Python source, 3.2
bytes of text a token): 27 MB a batch in every worker, 88 MB if every byte were a token."""

RAW_SCHEMA = pa.schema(
    [("id", pa.string()), ("source", pa.string()), ("domain", pa.string()), ("text", pa.large_binary())]
)
TEXT_SCHEMA = pa.schema([*list(RAW_SCHEMA)[:3], pa.field("text", pa.large_string())])


class Record(NamedTuple):
    """A document as it was found: raw text, or a fault that names why there is none."""

    id: str
    source: str
    domain: str
    data: bytes
    fault: str = ""


class Removal(NamedTuple):
    """Why a document goes no further: the rule, and what was measured against what."""

    id: str
    step: str
    rule: str
    value: float | None = None
    threshold: float | None = None


class Edit(NamedTuple):
    """A rule that changed a document's text."""

    id: str
    rule: str


@dataclass(frozen=True, slots=True)
class Passed:
    """What a block lets through, and the rows it leaves behind."""

    batch: Batch
    removed: Sequence[Removal] = ()
    edited: Sequence[Edit] = field(default=())


Block = Callable[[Batch], Passed]


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


def raw_batch(records: Sequence[Record]) -> Batch:
    """The batch of records that have a text."""
    whole = [record for record in records if not record.fault]
    columns = [
        [record.id for record in whole],
        [record.source for record in whole],
        [record.domain for record in whole],
        [record.data for record in whole],
    ]
    arrays = [pa.array(column, kind) for column, kind in zip(columns, RAW_SCHEMA.types, strict=True)]
    batch: Batch = pa.record_batch(arrays, schema=RAW_SCHEMA)
    return batch
