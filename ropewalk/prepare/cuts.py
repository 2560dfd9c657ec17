"""Spans cut out of texts: a layer for each chunk that has some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from .columns import Mask, Rows, text_buffers
from .kernels.spans import cut
from .stages import batch_writer, key_of
from .texts import LAYER, Texts, layer_batch, read_texts

CUTS_ID = "cuts-1"


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of documents in order: the document's row, and bytes within it."""

    rows: Rows
    starts: Rows
    stops: Rows

    @classmethod
    def none(cls) -> Spans:
        """No spans."""
        return cls(*(np.zeros(0, np.int64) for _ in range(3)))

    @classmethod
    def joined(cls, parts: Sequence[Spans]) -> Spans:
        """All of `parts` in order."""
        rows, starts, stops = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("rows", "starts", "stops")
        )
        order = np.lexsort((starts, rows))
        return cls(rows[order], starts[order], stops[order])

    @property
    def name(self) -> str:
        """A hash of all spans."""
        digest = xxhash.xxh3_128()
        for column in (self.rows, self.starts, self.stops):
            digest.update(column.tobytes())
        return digest.hexdigest()

    def removed_bytes(self, documents: int) -> npt.NDArray[np.int64]:
        """Bytes of each document that lie in a span."""
        sizes = np.zeros(documents, np.int64)
        np.add.at(sizes, self.rows, self.stops - self.starts)
        return sizes

    def where(self, chosen: Mask) -> Spans:
        """The spans of the chosen documents."""
        mine = chosen[self.rows]
        return Spans(self.rows[mine], self.starts[mine], self.stops[mine])

    def by_chunk(self, starts: Rows) -> list[Spans]:
        """The spans of each chunk, rows counted within it; `starts` are the first rows of the chunks and the end."""
        borders = np.searchsorted(self.rows, starts)
        return [
            Spans(self.rows[a:b] - first, self.starts[a:b], self.stops[a:b])
            for a, b, first in zip(borders, borders[1:], starts, strict=False)
        ]


@dataclass(frozen=True, slots=True)
class CutTask:
    """Spans to cut out of the texts of one chunk."""

    texts: Texts
    spans: Spans
    bytes: int
    target: Path

    @property
    def made(self) -> tuple[Path, ...]:
        """What is committed."""
        return (self.target,)


def cut_key(texts: Texts, spans: Spans) -> str:
    """The name of the layer of `texts` without `spans`."""
    return key_of(CUTS_ID, texts.name, spans.name)


def cut_texts(task: CutTask) -> int:
    """Commits the layer; the number of documents that changed."""
    with batch_writer(task.target, LAYER) as writer:
        for text, changed in _cut_batches(task.texts, task.spans):
            writer.write_batch(layer_batch(text, changed))
    return len(np.unique(task.spans.rows))


def characters_left(texts: Texts, spans: Spans) -> npt.NDArray[np.int64]:
    """Characters of each document that has a span, without its spans, by row."""
    left = [pc.utf8_length(text.filter(pa.array(changed))) for text, changed in _cut_batches(texts, spans)]
    return np.concatenate([np.zeros(0, np.int64), *(lengths.to_numpy() for lengths in left)])


def _cut_batches(texts: Texts, spans: Spans) -> Iterator[tuple[pa.LargeStringArray, Mask]]:
    """(texts without their spans, which of them had some) batch by batch."""
    position = 0
    for batch in read_texts(texts, ["text"]):
        rows = np.arange(position, position + len(batch) + 1)
        bounds = np.searchsorted(spans.rows, rows)
        yield _cut(batch["text"], spans, bounds), np.diff(bounds) > 0
        position += len(batch)


def _cut(text: pa.LargeStringArray, spans: Spans, bounds: Rows) -> pa.LargeStringArray:
    data, offsets = text_buffers(text)
    out = np.empty(offsets[-1] - offsets[0], np.uint8)
    places = cut(data, offsets, bounds, spans.starts, spans.stops, out)
    buffers = [None, pa.py_buffer(places), pa.py_buffer(out)]
    return pa.LargeStringArray.from_buffers(len(text), *buffers[1:])
