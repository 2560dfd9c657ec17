"""Documents -> tokens. Each chunk ends as one committed file in the shard format."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Tokenizer

from ropewalk.base.errors import DataError
from ropewalk.store.shards import Run, Shard, TokenType, document_key, write_runs_to

from . import tokenizer as tokenizers
from .chat import TEMPLATES, ChatEncoder, split_turns
from .columns import Mask, Rows, string_buffers, text_buffers
from .cuts import Spans
from .encoders import REFERENCE, Choice, Difference, Encoder, check, choose, encode_texts, open_encoder, stretch
from .holdout import Parts, part_id
from .kernels.keys import LONGEST, SECRET, SHORTEST, hash_strings
from .masks import Masker
from .stages import DamagedArtifact, damaged, filled_file, seal_key
from .texts import Texts, read_texts

CHECK_BYTES = 512
"""Text of every chunk (about 4 MB) that the reference encodes as well: 2 % of the time of the fastest encoder."""

SAMPLE_CHUNKS, SAMPLE_BYTES = 64, 4096
"""How many chunks a sample is taken from at most, and how much of each."""


@dataclass(frozen=True, slots=True)
class EncodeTask:
    """The documents of one chunk that become tokens."""

    texts: Texts
    wanted: Mask
    bytes: int
    tokenizer: Path
    end_of_text: int
    dtype: TokenType
    target: Path
    """Where the tokens go."""
    encoder: str = REFERENCE
    """Algorithm, as `choose_encoder` names it."""
    chat: str = ""
    """Name of the template of dialogues."""
    chat_sources: tuple[str, ...] = ()
    """Sources whose documents are dialogues."""
    masked: Spans = field(default_factory=Spans.none)
    """What the loss does not count, by the row of the document in the chunk."""
    parts: Parts = field(default_factory=Parts.none)
    """Of documents that are cut, by the same row: each part is encoded as a document."""

    @property
    def made(self) -> tuple[Path, ...]:
        """What is committed."""
        return (self.target,)


def choose_encoder(tokenizer: Path, chunks: Sequence[Texts], *, corpus_bytes: int) -> Choice:
    """The encoder for all chunks, tried on stretches of some of them."""
    every = -(-len(chunks) // SAMPLE_CHUNKS)
    batches = (itertools.islice(read_texts(texts, ["text"]), 1) for texts in chunks[:: max(1, every)])
    sample = (stretch(batch["text"], size=SAMPLE_BYTES) for batch in itertools.chain.from_iterable(batches))
    return choose(tokenizers.read(tokenizer), sample, corpus_bytes=corpus_bytes)


def encoders_of(chunks: Sequence[Path]) -> list[str]:
    """The algorithms that made the tokens of encoded chunks."""
    return sorted({open_chunk(path).encoder for path in chunks})


def open_chunk(path: Path) -> Shard:
    """An encoded chunk, every byte of which was checked; DamagedArtifact when it is not what was written."""
    try:
        shard = Shard(path)
        status = path.stat()
        _verify(path, status.st_size, status.st_mtime_ns, status.st_ino)
    except DataError as error:
        raise damaged(path, error) from None
    if shard.key != seal_key(path):
        raise DamagedArtifact(path, "it has no key, or it is the content of another file")
    return shard


# Keyed by what changes whenever a file is written: shards, lengths and encoders are read in turn.
@functools.lru_cache(maxsize=1 << 16)
def _verify(path: Path, size: int, modified_ns: int, inode: int) -> None:
    Shard(path).verify()


def encode_chunk(task: EncodeTask) -> int:
    """Encodes and commits one chunk, every document closed by the end-of-text token; the number of documents.

    When the encoder and the reference differ, the reference encodes the whole chunk; the file says who did it.
    """
    try:
        return _encode_with(opened(task.tokenizer, task.encoder), task)
    except Difference:
        return _encode_with(opened(task.tokenizer, REFERENCE), task)


def _encode_with(encoder: Encoder, task: EncodeTask) -> int:
    runs, key = _runs(task, encoder), seal_key(task.target)
    # The format has checksums of its own, and the key among what they cover.
    with filled_file(task.target, sealed=False) as file:
        return write_runs_to(file, runs, dtype=task.dtype, encoder=encoder.algorithm, key=key).documents


def _runs(task: EncodeTask, encoder: Encoder) -> Iterator[Run]:
    """The wanted documents and parts, batch by batch and there by kind: dialogues apart from plain text."""
    first, checked = 0, encoder.algorithm == REFERENCE
    for batch in read_texts(task.texts, ["id", "text"]):
        rows = np.flatnonzero(task.wanted[first : first + len(batch)])
        chosen = batch if len(rows) == len(batch) else batch.take(pa.array(rows))
        items = _items(chosen, first + rows, task.parts)
        first += len(batch)
        dialogue = _dialogues(task, items.documents["id"])
        borders = [0, *(np.flatnonzero(np.diff(dialogue)) + 1).tolist(), len(items.documents)]
        for start, stop in itertools.pairwise(borders):
            mine = items.slice(start, stop)
            if not len(mine.documents):
                continue
            if dialogue[start]:
                yield _dialogue_run(task, encoder, mine.documents)
                continue
            if not checked:
                sample = [stretch(mine.documents["text"], size=CHECK_BYTES)]
                check(encoder, opened(task.tokenizer, REFERENCE), sample, dtype=task.dtype)
                checked = True
            yield _plain_run(task, encoder, mine)


@dataclass(frozen=True, slots=True)
class _Items:
    """What becomes one document of a shard each: a document, or a part of one."""

    documents: pa.RecordBatch
    """`id` and `text`."""
    rows: Rows
    """The document's row in the chunk."""
    starts: Rows
    """Where in its text each begins."""

    def slice(self, start: int, stop: int) -> _Items:
        return _Items(self.documents.slice(start, stop - start), self.rows[start:stop], self.starts[start:stop])

    def spans(self, spans: Spans) -> Spans:
        """`spans` of documents of the chunk, as spans of the items by their places."""
        sizes = np.diff(text_buffers(self.documents["text"])[1])
        begins, ends = (np.searchsorted(self.rows, spans.rows, side=side) for side in ("left", "right"))
        counts = ends - begins
        places = np.repeat(begins, counts) + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.maximum(np.repeat(spans.starts, counts) - self.starts[places], 0)
        stops = np.minimum(np.repeat(spans.stops, counts) - self.starts[places], sizes[places])
        found = Spans(places, starts, stops)
        keep = found.starts < found.stops
        return Spans.joined([Spans(found.rows[keep], found.starts[keep], found.stops[keep])])


def _items(documents: pa.RecordBatch, rows: Rows, parts: Parts) -> _Items:
    """The documents, whose rows in the chunk are `rows`, those that are cut as their parts."""
    counts = np.searchsorted(parts.rows, rows, side="right") - np.searchsorted(parts.rows, rows)
    if not counts.any():
        return _Items(documents, rows, np.zeros(len(rows), np.int64))
    names, texts, starts = [], [], []
    data, offsets = text_buffers(documents["text"])
    for row, name, begin, end in zip(rows, documents["id"].to_pylist(), offsets, offsets[1:], strict=False):
        mine = parts.chosen(parts.rows == row)
        spans = list(zip(mine.starts.tolist(), mine.stops.tolist(), strict=True))
        names += [part_id(name, *span) for span in spans] or [name]
        starts += [start for start, _ in spans] or [0]
        texts += [data[begin + start : begin + stop].tobytes() for start, stop in spans] or [data[begin:end].tobytes()]
    made = pa.record_batch(
        [pa.array(names, pa.string()), pa.array(texts, pa.large_binary()).view(pa.large_string())], names=["id", "text"]
    )
    return _Items(made, np.repeat(rows, np.maximum(counts, 1)), np.array(starts, np.int64))


def _plain_run(task: EncodeTask, encoder: Encoder, items: _Items) -> Run:
    text = items.documents["text"]
    encoded = encoder.encode(text, end=task.end_of_text, dtype=task.dtype)
    spans = items.spans(task.masked)
    places = np.arange(len(text))
    return Run(
        keys=document_keys(items.documents["id"]),
        lengths=encoded.lengths,
        tokens=encoded.tokens,
        counts=_masker(task.tokenizer).counts(text, places, spans, encoded) if len(spans.rows) else None,
        text_bytes=np.diff(text_buffers(text)[1]),
    )


def _dialogue_run(task: EncodeTask, encoder: Encoder, documents: pa.RecordBatch) -> Run:
    """The loss counts the answers alone, and so not the end of text."""
    chat = ChatEncoder(
        TEMPLATES[task.chat],
        _loaded(task.tokenizer),
        lambda texts: encode_texts(encoder, texts),
        end=task.end_of_text,
    )
    names, texts = documents["id"].to_pylist(), documents["text"].to_pylist()
    encoded = chat.dialogues(split_turns(text, document=name) for name, text in zip(names, texts, strict=True))
    return Run(
        keys=document_keys(documents["id"]),
        lengths=np.array([len(dialogue.tokens) + 1 for dialogue in encoded], np.int64),
        tokens=np.concatenate([np.append(dialogue.tokens, np.uint32(task.end_of_text)) for dialogue in encoded]),
        counts=np.concatenate([np.append(dialogue.counts, False) for dialogue in encoded]),
        text_bytes=np.array([dialogue.text_bytes for dialogue in encoded], np.int64),
    )


def document_keys(ids: pa.StringArray) -> npt.NDArray[np.uint64]:
    """`document_key` of each id."""
    data, offsets = string_buffers(ids)
    keys = np.zeros(len(ids), np.uint64)
    hash_strings(data, offsets, SECRET, keys)
    sizes = np.diff(offsets)
    for row in np.flatnonzero((sizes < SHORTEST) | (sizes > LONGEST)).tolist():
        keys[row] = document_key(ids[row].as_py())
    return keys


def _dialogues(task: EncodeTask, ids: pa.StringArray) -> Mask:
    """Which documents are dialogues; an id begins with its source."""
    if not task.chat_sources:
        return np.zeros(len(ids), bool)
    return np.array([name.partition(":")[0] in task.chat_sources for name in ids.to_pylist()], bool)


@functools.lru_cache(maxsize=4)
def opened(tokenizer: Path, algorithm: str) -> Encoder:
    """Made ready once a worker, not once a chunk: tables of a vocabulary of 16,000 take 0.3 s (measured)."""
    return open_encoder(tokenizers.read(tokenizer), algorithm)


@functools.lru_cache(maxsize=1)
def _masker(tokenizer: Path) -> Masker:
    return Masker(_loaded(tokenizer))


@functools.lru_cache(maxsize=1)
def _loaded(tokenizer: Path) -> Tokenizer:
    return tokenizers.load(tokenizer)
