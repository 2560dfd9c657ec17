"""SimHash: near-duplicates by 64-bit fingerprints at a small Hamming distance, found through block tables.

The fingerprint of a document takes the majority of its shingles' hashes, bit by bit (Charikar 2002), so documents that
share most shingles differ in few bits. Pairs within distance k are found as Manku, Jain and Das Sarma (2007) do: cut
the 64 bits into more than k blocks; k differing bits touch at most k of them, so all the others agree, and one table
for each choice of agreeing blocks finds every pair. Nothing within the distance is missed; the distance is then
checked.

The fingerprint knows neither how long a document is nor how much of it differs: `minhash` with verified Jaccard
similarity is the better judge, this the smaller memory.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pyarrow as pa

from .columns import text_buffers
from .kernels.mix import mixed
from .kernels.shingles import shingle_room
from .kernels.simhash import simhash_fingerprints
from .kernels.words import Hashes, characters

ALGORITHM = "simhash-1"
"""Changes with everything that changes a fingerprint."""
BITS = 64


def fingerprints(text: pa.LargeStringArray, *, shingle_words: int) -> Hashes:
    """The 64-bit fingerprint of each document; 0 for one without words."""
    data, offsets = text_buffers(text)
    ring = np.empty(shingle_words, np.uint64)
    return simhash_fingerprints(data, offsets, *characters(), ring, shingle_room(offsets))


def tables(distance: int, blocks: int) -> int:
    """Number of tables: the choices of `distance` blocks that may differ."""
    return math.comb(blocks, distance)


def block_keys(prints: Hashes, *, distance: int, blocks: int) -> Hashes:
    """[table, document]: the bits of the blocks that must agree, one choice a table; 0 for a document without words.

    Two fingerprints within `distance` share at least one key, and a table's key says nothing of the blocks it leaves
    out.
    """
    edges = [BITS * block // blocks for block in range(blocks + 1)]
    masks = [(1 << high) - (1 << low) for low, high in itertools.pairwise(edges)]
    keys = np.empty((tables(distance, blocks), len(prints)), np.uint64)
    for table, differing in enumerate(itertools.combinations(masks, distance)):
        left_out = sum(differing)
        # One of the bits left out is set in all keys: agreeing blocks of zeros are no missing key.
        mark = left_out & -left_out
        agreeing = prints & np.uint64((1 << BITS) - 1 - left_out) | np.uint64(mark)
        # Mixed, because tables take the bits of a key for random ones.
        keys[table] = np.where(prints, mixed(agreeing), np.uint64(0))
    return keys
