"""What is remembered of a document to find its near-duplicates: band keys of every one, shingle sets of a few.

Keys are small (128 bytes a document with 16 bands) and are kept for all. A set is as large as the text, so it is made
only for documents that share a key with another, from their text, a second time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from .. import simhash
from ..columns import Offsets, Rows, text_buffers
from ..config import Near
from ..kernels import minhash
from ..kernels.shingles import shingle_room, unique_shingles
from ..kernels.words import WORDS_ID, Hashes, characters

LONGEST_BYTES = (1 << 31) - (1 << 16)
"""Of a document that a GPU signs: places have 32 bits there."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """The keys of some documents, in order."""

    keys: Hashes
    """[band, document]; 0 where a document has no words and is like no other."""

    @property
    def documents(self) -> int:
        return int(self.keys.shape[1])

    def band(self, number: int) -> Hashes:
        """The keys of one band."""
        keys: Hashes = self.keys[number]
        return keys


@dataclass(frozen=True, slots=True)
class Sets:
    """What pairs are verified by: sorted shingle hashes, or one fingerprint a document."""

    values: Hashes
    bounds: Offsets
    """Document i has `values[bounds[i] : bounds[i + 1]]`."""


def algorithm(near: Near) -> str:
    """Names everything that keys and sets depend on; stored in every file, and files of another name are refused."""
    if near.kind == "simhash":
        method = f"{simhash.ALGORITHM} bits={near.fingerprint_bits} tables={near.tables} of {near.table_bits}"
    else:
        method = f"{minhash.ALGORITHM} bands={near.bands} rows={near.rows}"
    return f"{method} shingle_words={near.shingle_words} {WORDS_ID}"


def bands(near: Near) -> int:
    """Keys that a document has."""
    return near.tables if near.kind == "simhash" else near.bands


def sketch(text: pa.LargeStringArray, near: Near) -> Sketch:
    """The keys of each document of a text column; on a GPU when `near.device` is "cuda" ("auto" is for
    `device.placed` to decide, and the CPU here)."""
    if near.kind == "simhash":
        prints = simhash.fingerprints(text, shingle_words=near.shingle_words, bits=near.fingerprint_bits)
        return Sketch(simhash.table_keys(prints, tables=near.tables, table_bits=near.table_bits))
    data, offsets = text_buffers(text)
    if near.device == "cuda" and np.diff(offsets).max(initial=0) <= LONGEST_BYTES:
        # Imported here: torch takes seconds, and the rest of prepare does without.
        from ..gpu.minhash import minhash_keys

        return Sketch(minhash_keys(data, offsets, bands=near.bands, rows=near.rows, shingle_words=near.shingle_words))
    functions = minhash.hash_functions(near.bands * near.rows)
    ring, room = np.empty(near.shingle_words, np.uint64), shingle_room(offsets)
    return Sketch(minhash.minhash_keys(data, offsets, *characters(), ring, room, *functions, near.bands))


def sets(text: pa.LargeStringArray, rows: Rows, near: Near) -> Sets:
    """The sets of the documents `rows` of a text column."""
    if near.kind == "simhash":
        chosen = text.take(pa.array(rows))
        prints = simhash.fingerprints(chosen, shingle_words=near.shingle_words, bits=near.fingerprint_bits)
        return Sets(prints.reshape(-1), np.arange(len(rows) + 1) * prints.shape[1])
    data, offsets = text_buffers(text)
    ring, room = np.empty(near.shingle_words, np.uint64), shingle_room(offsets)
    # A shingle takes 5.5 bytes of English, 8 of Python, 3.5 of classical Chinese.
    places = int((offsets[rows + 1] - offsets[rows]).sum()) // 5 + room
    return Sets(*unique_shingles(data, offsets, rows, *characters(), ring, room, places))
