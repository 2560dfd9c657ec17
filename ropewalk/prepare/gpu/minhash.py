"""MinHash band keys of a text column on a GPU: bit by bit those of the CPU kernel.

Text goes to the device in batches of whole documents. While one batch is worked on, threads copy the next one to
page-locked memory, from where the device fetches it. Nothing but keys comes back, so the host never waits for a kernel:
what the device alone knows (how many words there are) is bounded by the bytes, and programs beyond it end at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..columns import Bytes, Offsets
from ..kernels.minhash import hash_functions
from ..kernels.words import Hashes, characters
from . import signatures, words

BATCH_BYTES = 32 << 20
"""Text of one batch. Each of its bytes takes about ten on the device, and one of page-locked memory."""
_AHEAD = 3
"""Batches that are copied to page-locked memory, and batches that the device has, at a time."""
_PIECE = 4 << 20
_COPIERS = min(16, len(os.sched_getaffinity(0)))
"""Threads that copy text to page-locked memory and keys from it, and bytes of text that they take at a time."""
_BEYOND = int(np.iinfo(np.int32).max)


def minhash_keys(data: Bytes, offsets: Offsets, *, bands: int, rows: int, shingle_words: int) -> Hashes:
    """(band, document) as `kernels.minhash.minhash_keys` gives them; a document has less than 2^31 bytes.

    Processes spread over the GPUs of a machine by their number.
    """
    return _signer(bands, rows, shingle_words, os.getpid() % torch.cuda.device_count()).keys(data, offsets)


@functools.cache
def _signer(bands: int, rows: int, shingle_words: int, gpu: int) -> Signer:
    return Signer(bands=bands, rows=rows, shingle_words=shingle_words, device=torch.device("cuda", gpu))


@dataclass(frozen=True, slots=True)
class Batch:
    """Some documents, in host memory or on the device."""

    text: Tensor
    """Their bytes, then at least `words.PADDING` zeros."""
    bounds: Tensor
    """int32: document i is `text[bounds[i] : bounds[i + 1]]`."""
    first_segments: Tensor
    """int32: the first of each document's segments, as many as it can need (see `signatures.SEGMENT`)."""
    size: int
    """Bytes of text."""
    segments: int

    def to(self, device: torch.device) -> Batch:
        """The same there; the copy is under way."""
        return replace(
            self,
            text=self.text.to(device, non_blocking=True),
            bounds=self.bounds.to(device, non_blocking=True),
            first_segments=self.first_segments.to(device, non_blocking=True),
        )


def batches(
    data: Bytes, offsets: Offsets, copiers: ThreadPoolExecutor, *, page_locked: bool = True
) -> Iterator[tuple[slice, Batch]]:
    """(documents, batch) of the documents of a column, in order, copied to host memory; a document that is longer than
    BATCH_BYTES is a batch. The next ones are copied while a batch is in use."""
    ahead: list[tuple[slice, Batch, list[Future[None]]]] = []
    for documents in _cuts(offsets):
        some = offsets[documents.start : documents.stop + 1]
        ahead.append((documents, *_copied(data, some, copiers, page_locked)))
        if len(ahead) == _AHEAD:
            yield _ready(*ahead.pop(0))
    for batch in ahead:
        yield _ready(*batch)


class Signer:
    """Makes keys on one device with one set of hash functions."""

    def __init__(self, *, bands: int, rows: int, shingle_words: int, device: torch.device) -> None:
        self._bands, self._rows, self._width, self._device = bands, rows, shingle_words, device
        tables = (*hash_functions(bands * rows), *characters())
        self._flips, self._factors, self._classes, self._folds = (
            torch.tensor(table, device=device) for table in tables
        )
        # Kept, since memory that a stream has used is used again by that stream alone.
        self._streams = [torch.cuda.Stream(device) for _ in range(_AHEAD)] if device.type == "cuda" else []

    def keys(self, data: Bytes, offsets: Offsets) -> Hashes:
        """(band, document) of a column in host memory."""
        keys = np.empty((self._bands, len(offsets) - 1), np.uint64)
        flying: list[tuple[slice, Tensor, torch.cuda.Event]] = []
        with torch.cuda.device(self._device), ThreadPoolExecutor(_COPIERS, thread_name_prefix="page-lock") as copiers:
            for number, (documents, batch) in enumerate(batches(data, offsets, copiers)):
                with torch.cuda.stream(self._streams[number % _AHEAD]):
                    made = self.keys_of(batch.to(self._device))
                    back = torch.empty(made.shape, dtype=made.dtype, pin_memory=True).copy_(made, non_blocking=True)
                    landed = torch.cuda.Event()
                    landed.record()
                flying.append((documents, back, landed))
                if len(flying) == _AHEAD:
                    _land(keys, *flying.pop(0), copiers)
            for last in flying:
                _land(keys, *last, copiers)
        return keys

    def keys_of(self, batch: Batch) -> Tensor:
        """(band, document) as int64, of a batch on the device; the work is under way."""
        first_words, hashes, total = self._hashed(batch)
        documents, functions = len(batch.bounds) - 1, self._bands * self._rows
        shingles = torch.empty(len(hashes), dtype=torch.uint32, device=self._device)
        signatures.hash_shingles[(_parts(len(hashes), signatures.SHINGLES),)](
            hashes, total, shingles, WIDTH=self._width, SHINGLES=signatures.SHINGLES, num_warps=4
        )
        minima = torch.full((documents, functions), -1, dtype=torch.int32, device=self._device).view(torch.uint32)
        numbers = torch.arange(batch.segments, dtype=torch.int32, device=self._device)
        document_of = torch.searchsorted(batch.first_segments, numbers, right=True, out_int32=True) - 1
        signatures.sign[(batch.segments,)](
            *(hashes, shingles, first_words, document_of, batch.first_segments, self._flips, self._factors, minima),
            WIDTH=self._width,
            FUNCTIONS=functions,
            SEGMENT=signatures.SEGMENT,
            num_warps=1,
        )
        keys = torch.empty((self._bands, documents), dtype=torch.int64, device=self._device)
        signatures.fold[(_parts(documents, signatures.DOCUMENTS), self._bands)](
            *(minima, first_words, keys, documents),
            ROWS=self._rows,
            BANDS=self._bands,
            DOCUMENTS=signatures.DOCUMENTS,
            num_warps=4,
        )
        return keys

    def _hashed(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """(the first word of each document and the number of all, their hashes, that number alone). There is room for
        more hashes than there are."""
        groups = _parts(batch.size, 8)
        parts = max(1, _parts(groups, words.LANES))
        begins = _bits(batch)
        marks = torch.empty(groups, dtype=torch.uint8, device=self._device)
        counts = torch.empty(parts, dtype=torch.int32, device=self._device)
        words.mark_words[(parts,)](
            batch.text, begins, self._classes, marks, counts, batch.size, LANES=words.LANES, num_warps=4
        )
        sums = counts.cumsum(0, dtype=torch.int32)
        # A word and what parts it from the next take two bytes; a document's last is parted from the next by nothing.
        room = batch.size // 2 + len(batch.bounds)
        places = torch.full((room,), _BEYOND, dtype=torch.int32, device=self._device)
        words.list_words[(parts,)](marks, sums, places, groups, LANES=words.LANES, num_warps=4)
        hashes = torch.empty(room, dtype=torch.int64, device=self._device)
        words.hash_words[(_parts(room, words.WORDS),)](
            *(batch.text, begins, self._classes, self._folds, places, sums[-1:], hashes, batch.size),
            WORDS=words.WORDS,
            num_warps=1,
        )
        return torch.searchsorted(places, batch.bounds, out_int32=True), hashes, sums[-1:]


def _cuts(offsets: Offsets) -> Iterator[slice]:
    first = 0
    while first < len(offsets) - 1:
        fits = int(np.searchsorted(offsets, offsets[first] + BATCH_BYTES, "right")) - 1
        last = max(first + 1, fits)
        yield slice(first, last)
        first = last


def _copied(
    data: Bytes, offsets: Offsets, copiers: ThreadPoolExecutor, page_locked: bool
) -> tuple[Batch, list[Future[None]]]:
    """A batch and the copies that fill it."""
    first, last = int(offsets[0]), int(offsets[-1])
    size = last - first
    text = torch.empty(_parts(size, 8) * 8 + words.PADDING, dtype=torch.uint8, pin_memory=page_locked)
    source, target = data[first:last], text.numpy()
    target[size:] = 0
    pieces = [slice(start, min(start + _PIECE, size)) for start in range(0, size, _PIECE)]
    copies = [copiers.submit(np.copyto, target[piece], source[piece]) for piece in pieces]
    # No document has more words than half its bytes, and one.
    segments = np.diff(offsets) // (2 * signatures.SEGMENT) + 1
    tables = torch.from_numpy(np.stack([offsets - first, np.concatenate([[0], segments.cumsum()])]).astype(np.int32))
    bounds, first_segments = tables.pin_memory() if page_locked else tables
    return Batch(text, bounds, first_segments[:-1], size, int(segments.sum())), copies


def _ready(documents: slice, batch: Batch, copies: list[Future[None]]) -> tuple[slice, Batch]:
    for copy in copies:
        copy.result()
    return documents, batch


def _bits(batch: Batch) -> Tensor:
    """One bit a byte of the text, set where a document begins that is not empty."""
    bounds, lengths = batch.bounds[:-1], batch.bounds.diff()
    numbers = torch.zeros(batch.size // 32 + 1, dtype=torch.int32, device=bounds.device)
    # No two documents begin at one byte, so adding sets bits.
    bits = torch.where(lengths > 0, torch.ones_like(bounds) << (bounds & 31), 0)
    return numbers.index_add_(0, bounds.long() >> 5, bits).view(torch.uint8)


def _land(keys: Hashes, documents: slice, back: Tensor, landed: torch.cuda.Event, copiers: ThreadPoolExecutor) -> None:
    landed.synchronize()
    made: Hashes = back.numpy().view(np.uint64)
    # By threads: of short documents there are more keys than text, and their memory is touched for the first time.
    copies = [copiers.submit(np.copyto, row[documents], part) for row, part in zip(keys, made, strict=True)]
    for copy in copies:
        copy.result()


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)
