"""The texts of a chunk: as they were read, under layers of edits.

A stage that edits does not write all texts again. It writes a layer: the rows that changed and their new texts, batch
by batch as the documents lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from .columns import Mask, overlaid
from .stages import read_batches

LAYER = pa.schema([("row", pa.int64()), ("text", pa.large_string())])
"""`row` counts within the batch."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Where the texts of one chunk lie."""

    documents: Path
    layers: tuple[Path, ...] = ()
    """The last one wins."""

    @property
    def files(self) -> tuple[Path, ...]:
        """All that they are made of."""
        return (self.documents, *self.layers)

    @property
    def name(self) -> str:
        """What the texts depend on; equal names, equal texts."""
        return "+".join(path.stem for path in self.files)

    def under(self, layer: Path) -> Texts:
        """The same texts with one more layer."""
        return Texts(self.documents, (*self.layers, layer))


def read_texts(texts: Texts, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The documents of a chunk batch by batch: the columns asked for (all when None), `text` under its layers."""
    layers = [read_batches(path) for path in texts.layers]
    for batch, *changes in zip(read_batches(texts.documents, columns), *layers, strict=True):
        text = batch["text"]
        for change in changes:
            text = overlaid(text, change["row"].to_numpy(), change["text"])
        yield batch.set_column(batch.schema.get_field_index("text"), "text", text)


def read_wanted(texts: Texts, wanted: Mask) -> Iterator[tuple[list[str], list[str]]]:
    """(ids, texts) of the wanted documents of a chunk, batch by batch; batches without one are left out."""
    position = 0
    for batch in read_texts(texts, ["id", "text"]):
        mask = wanted[position : position + len(batch)]
        position += len(batch)
        if mask.any():
            chosen = batch.filter(pa.array(mask))
            yield chosen["id"].to_pylist(), chosen["text"].to_pylist()


def layer_batch(text: pa.LargeStringArray, changed: Mask) -> pa.RecordBatch:
    """The layer of a batch whose texts are now `text`; `changed` says which were others before."""
    assert len(text) == len(changed), "one text a document"
    rows = pa.array(np.flatnonzero(changed), pa.int64())
    return pa.record_batch([rows, text.take(rows)], schema=LAYER)


def chosen_name(texts: Texts, chosen: Mask) -> str:
    """What the chosen texts of a chunk depend on."""
    return f"{texts.name}:{xxhash.xxh3_128_hexdigest(np.packbits(chosen).tobytes())}:{len(chosen)}"


def read_chosen(texts: Texts, chosen: Mask) -> Iterator[pa.LargeStringArray]:
    """The chosen texts of a chunk, batch by batch; batches without one are left out."""
    position = 0
    for batch in read_texts(texts, ["text"]):
        mask = chosen[position : position + len(batch)]
        position += len(batch)
        if mask.any():
            yield batch["text"].filter(pa.array(mask))
