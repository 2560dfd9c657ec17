"""MinHash signatures, folded into band keys: documents that share a key are worth comparing.

A signature has bands x rows minima, each of one hash function over all shingles (Broder 1997). Two documents agree in
one of them with the probability of their Jaccard similarity J, and share the key of at least one band (all its rows
agree) with 1 - (1 - J^rows)^bands. Every shingle meets every function. Shortcuts in which it meets a few can lose what
the curve promises: one library's finds 0.29 of pairs with J >= 0.95 among documents of 5.7 kB.

Function j maps the 32-bit shingle x to (x ^ flip[j]) * factor[j] mod 2^32, a permutation of 32 bits; x is mixed
already. The minimum looks at high bits first, the good ones of a product. 80 functions take 3 to 4 ns a shingle, since
the compiler makes vector instructions of the inner loop.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Offsets
from .mix import mixed
from .shingles import shingle_document
from .words import Hashes

ALGORITHM = "minhash-1"
"""Changes with everything that changes a key: the shingle hash, the functions, the folding."""

Words32 = npt.NDArray[np.uint32]


def hash_functions(count: int) -> tuple[Words32, Words32]:
    """(flip, factor) of `count` functions, the same on every machine."""
    drawn = mixed(np.arange(1, count + 1, dtype=np.uint64))
    return (drawn >> np.uint64(32)).astype(np.uint32), drawn.astype(np.uint32) | np.uint32(1)


@njit(cache=True, nogil=True)
def minhash_keys(
    data: Bytes,
    offsets: Offsets,
    classes: npt.NDArray[np.uint16],
    folds: npt.NDArray[np.uint32],
    ring: Hashes,
    room: int,
    flip: Words32,
    factor: Words32,
    bands: int,
) -> Hashes:
    """The key of each band (first axis) for each document; 0 for a document without words, which is like no other."""
    documents = len(offsets) - 1
    keys = np.zeros((bands, documents), np.uint64)
    shingles = np.empty(room, np.uint64)
    signature = np.empty(len(flip), np.uint32)
    for document in range(documents):
        found = shingle_document(data, offsets[document], offsets[document + 1], classes, folds, ring, shingles)
        if found:
            _sign(shingles[:found], flip, factor, signature)
            _fold(signature, keys, document)
    return keys


@njit(cache=True, nogil=True)
def _sign(shingles: Hashes, flip: Words32, factor: Words32, signature: Words32) -> None:
    signature[:] = np.uint32(0xFFFFFFFF)
    # Four shingles a turn: a function's two numbers and its minimum are loaded once for all of them. The last turn
    # repeats shingles, which changes no minimum.
    last = len(shingles) - 1
    for first in range(0, len(shingles), 4):
        a = np.uint32(shingles[first])
        b = np.uint32(shingles[min(first + 1, last)])
        c = np.uint32(shingles[min(first + 2, last)])
        d = np.uint32(shingles[min(first + 3, last)])
        for function in range(len(signature)):
            mask, times = flip[function], factor[function]
            least = min(np.uint32((a ^ mask) * times), np.uint32((b ^ mask) * times))
            other = min(np.uint32((c ^ mask) * times), np.uint32((d ^ mask) * times))
            signature[function] = min(signature[function], min(least, other))


@njit(cache=True, nogil=True)
def _fold(signature: Words32, keys: Hashes, document: int) -> None:
    """One 64-bit key for the rows of each band: two different bands of values meet with a chance of 2^-64."""
    bands = len(keys)
    rows = len(signature) // bands
    for band in range(bands):
        key = np.uint64(0x9E3779B97F4A7C15)
        for row in range(rows):
            key = (key ^ np.uint64(signature[band * rows + row])) * np.uint64(0xFF51AFD7ED558CCD)
            key ^= key >> np.uint64(32)
        keys[band, document] = key if key else np.uint64(1)
