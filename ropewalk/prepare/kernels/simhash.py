"""SimHash fingerprints: bits that differ in few places for documents that share most shingles (Charikar 2002)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Offsets
from .words import Hashes

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


@njit(cache=True, nogil=True)
def simhash_fingerprints(values: Hashes, bounds: Offsets, words: int) -> Hashes:
    """[document, word]: bit b of word w is the majority of that bit over the document's different shingles.

    Document i has the shingles `values[bounds[i] : bounds[i + 1]]`; a tie is 0. Word 0 of a shingle is its hash, the
    others are made of it by SplitMix64.
    """
    documents = len(bounds) - 1
    fingerprints = np.zeros((documents, words), np.uint64)
    votes = np.empty(64, np.uint32)
    for document in range(documents):
        shingles = values[bounds[document] : bounds[document + 1]]
        for word in range(words):
            _vote(shingles, np.uint64(word) * _STEP, votes)
            for bit in range(64):
                if 2 * np.int64(votes[bit]) > len(shingles):
                    fingerprints[document, word] |= np.uint64(1) << np.uint64(bit)
    return fingerprints


@njit(cache=True, nogil=True)
def _vote(shingles: Hashes, seed: np.uint64, votes: npt.NDArray[np.uint32]) -> None:
    """How many of the shingles' words have each bit.

    Seven words are added at a time, all 64 bits at once, by full adders into three planes of bits; then every bit's
    sum is read from the planes. That is three times as fast as looking at each bit of each word.
    """
    votes[:] = 0
    whole = len(shingles) - len(shingles) % 7
    for at in range(0, whole, 7):
        a, b, c = _word(shingles[at], seed), _word(shingles[at + 1], seed), _word(shingles[at + 2], seed)
        d, e, f = _word(shingles[at + 3], seed), _word(shingles[at + 4], seed), _word(shingles[at + 5], seed)
        one, two = _added(a, b, c)
        one, more = _added(one, d, e)
        one, most = _added(one, f, _word(shingles[at + 6], seed))
        two, four = _added(two, more, most)
        for bit in range(64):
            place = np.uint64(bit)
            low, middle, high = one >> place & np.uint64(1), two >> place & np.uint64(1), four >> place & np.uint64(1)
            votes[bit] += np.uint32(low + np.uint64(2) * middle + np.uint64(4) * high)
    for shingle in shingles[whole:]:
        word = _word(shingle, seed)
        for bit in range(64):
            votes[bit] += np.uint32(word >> np.uint64(bit) & np.uint64(1))


@njit(cache=True, nogil=True)
def _added(a: np.uint64, b: np.uint64, c: np.uint64) -> tuple[np.uint64, np.uint64]:
    """(sum, carry) of three bits, for 64 of them."""
    half = a ^ b
    return half ^ c, a & b | half & c


@njit(cache=True, nogil=True)
def _word(shingle: np.uint64, seed: np.uint64) -> np.uint64:
    """The shingle's hash for seed 0, another hash of it for any other seed."""
    if seed == 0:
        return shingle
    value = shingle + seed
    value = (value ^ value >> np.uint64(30)) * _FIRST
    value = (value ^ value >> np.uint64(27)) * _SECOND
    return value ^ value >> np.uint64(31)
