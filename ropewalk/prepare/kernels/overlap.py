"""N-grams of a corpus that stand in a set of texts: one rolling hash over the words of each document.

The hash of an n-gram is a polynomial of the hashes of its words modulo 2^64, mixed. Two different n-grams have the same
one by chance with probability 2^-64: of 10^12 words against 10^6 n-grams, 5 % for one false match in the whole corpus.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Offsets
from .ngrams import mixed

Values = npt.NDArray[np.uint64]

_ROLL = np.uint64(0xD1342543DE82EF95)
"""A multiplier of good spectrum (Steele and Vigna 2021)."""


@njit(cache=True, nogil=True)
def ngram_hashes(words: Values, length: int) -> Values:
    """The hash of every n-gram of one text, in order."""
    count = max(0, len(words) - length + 1)
    found = np.empty(count, np.uint64)
    state, gone = np.uint64(0), np.uint64(1)
    for _ in range(length):
        gone *= _ROLL
    for place in range(len(words)):
        state = state * _ROLL + words[place]
        if place >= length:
            state -= gone * words[place - length]
        if place >= length - 1:
            found[place - length + 1] = mixed(state)
    return found


@njit(cache=True, nogil=True)
def mark_ngrams(
    words: Values,
    firsts: Offsets,
    length: int,
    wanted: Values,
    present: npt.NDArray[np.bool_],
    out: Offsets,
) -> None:
    """For every n-gram of the documents whose hash is in `wanted` (sorted), writes the number of its first word to
    `out`, unless an earlier one is there. `present` says which low bits of hashes `wanted` has."""
    gone = np.uint64(1)
    for _ in range(length):
        gone *= _ROLL
    low = np.uint64(len(present) - 1)
    for document in range(len(firsts) - 1):
        first, stop = firsts[document], firsts[document + 1]
        state = np.uint64(0)
        for place in range(first, stop):
            state = state * _ROLL + words[place]
            if place - first >= length:
                state -= gone * words[place - length]
            if place - first < length - 1:
                continue
            hashed = mixed(state)
            if not present[hashed & low]:
                continue
            found = np.searchsorted(wanted, hashed)
            if found < len(wanted) and wanted[found] == hashed and out[found] < 0:
                out[found] = place - length + 1
