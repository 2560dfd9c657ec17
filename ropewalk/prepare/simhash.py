"""SimHash: near-duplicates by fingerprints at a small Hamming distance, found through tables of sampled bits.

The fingerprint of a document takes the majority of its shingles' hashes, bit by bit (Charikar 2002). Two documents
whose shingle sets have the cosine c differ in a share arccos(c) / pi of their bits, give or take
sqrt(p (1 - p) / bits); sets of equal size and Jaccard similarity J have c = 2J / (1 + J). One word changed in 150
changes 5 of 146 shingles and 8 % of the bits, J = 0.8 is 15 %: 64 bits cannot tell these two apart, 512 can.

Manku, Jain and Das Sarma (2007) find all pairs within 3 of 64 bits with a table for each choice of blocks that agree.
At 70 of 512 bits their tables would be beyond counting, so each table here takes `table_bits` bits at random (Indyk and
Motwani 1998): a pair at distance d shares its key with the chance (1 - d / bits)^table_bits, and `Near.recall`
says what all tables find. The distance is checked in any case.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pyarrow as pa

from .columns import Rows, text_buffers
from .kernels.mix import mixed
from .kernels.shingles import shingle_room, unique_shingles
from .kernels.simhash import simhash_fingerprints
from .kernels.words import Hashes, characters

ALGORITHM = "simhash-2"
"""Changes with everything that changes a fingerprint or a key."""


def fingerprints(text: pa.LargeStringArray, *, shingle_words: int, bits: int) -> Hashes:
    """[document, word of 64 bits]: the fingerprint of each document; zeros for one without words."""
    data, offsets = text_buffers(text)
    ring, room = np.empty(shingle_words, np.uint64), shingle_room(offsets)
    rows: Rows = np.arange(len(offsets) - 1)
    values, bounds = unique_shingles(data, offsets, rows, *characters(), ring, room, len(data) // 5 + room)
    return simhash_fingerprints(values, bounds, bits // 64)


def table_keys(prints: Hashes, *, tables: int, table_bits: int) -> Hashes:
    """[table, document]: a hash of the bits that the table looks at; 0 for a document without words."""
    keys = np.empty((tables, len(prints)), np.uint64)
    worded = prints.any(axis=1)
    for table, masks in enumerate(_masks(prints.shape[1] * 64, tables, table_bits)):
        key = np.zeros(len(prints), np.uint64)
        for word in np.flatnonzero(masks):
            # The word's number: equal bits at other places are another key.
            key = mixed(key ^ (prints[:, word] & masks[word]) + np.uint64(word + 1))
        keys[table] = np.where(worded, np.maximum(key, np.uint64(1)), np.uint64(0))
    return keys


@lru_cache(maxsize=8)
def _masks(bits: int, tables: int, table_bits: int) -> Hashes:
    """[table, word]: the bits of a fingerprint that each table looks at, the same on every machine."""
    masks = np.zeros((tables, bits // 64), np.uint64)
    for table in range(tables):
        order = np.argsort(mixed(np.arange(1, bits + 1, dtype=np.uint64) + np.uint64(table * bits)), kind="stable")
        for place in order[:table_bits].tolist():
            masks[table, place // 64] |= np.uint64(1) << np.uint64(place % 64)
    masks.setflags(write=False)
    return masks
