"""N-grams of a sequence of numbers (tokens, or hashes of words), represented by few of their parts: minimizers.

Every run of `length` numbers is represented by one of the runs of `part` numbers in it, that of the least hash, the
first of equals. The choice depends on the n-gram alone, so that equal n-grams choose equal parts at equal places
(winnowing, Schleimer et al. 2003). Neighbours mostly share theirs: with parts of half the length, one entry in
(length / 4 + 1) is kept. Whoever looks an n-gram up finds all its places through one hash, and compares what is there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Offsets
from .words import SEED, START, UNSEGMENTED, Classes, Folds, added, decode, extends, finished

Values = npt.NDArray[np.uint64]

NGRAMS_ID = "ngrams-1"
"""Changes with everything that changes a hash or the choice of parts."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MOST = np.uint64(0xFFFFFFFFFFFFFFFF)


@njit(cache=True, nogil=True)
def choose_parts(values: Values, starts: Offsets, stops: Offsets, length: int, part: int) -> tuple[Values, Offsets]:
    """(hash, place) of the parts that represent the n-grams of every document, `values[starts[i] : stops[i]]`."""
    found = 0
    hashes, places = np.empty(len(values), np.uint64), np.empty(len(values), np.int64)
    choices = length - part + 1
    for document in range(len(starts)):
        first, last = starts[document], stops[document] - part + 1
        chosen = np.int64(-1)
        least = _MOST
        for place in range(first, last):
            hashed = part_hash(values, place, part)
            if place - chosen >= choices and chosen >= first:
                # The least has left the n-gram: look for the first least of those in it.
                least, chosen = _MOST, np.int64(place)
                for other in range(place - choices + 1, place):
                    seen = part_hash(values, other, part)
                    if seen < least:
                        least, chosen = seen, np.int64(other)
            if hashed < least or chosen < first:
                least, chosen = hashed, np.int64(place)
            if place - first >= choices - 1 and (found == 0 or places[found - 1] != chosen):
                hashes[found], places[found] = mixed(least), chosen
                found += 1
    return hashes[:found], places[:found]


@njit(cache=True, nogil=True)
def part_hash(values: Values, place: int, part: int) -> Any:
    """The hash of the numbers from `place` on by which parts are compared."""
    state = np.uint64(part)
    for offset in range(part):
        state = (state ^ values[place + offset]) * _FACTOR
        state ^= state >> np.uint64(29)
    return mixed(state)


@njit(cache=True, nogil=True)
def mixed(value: Any) -> Any:
    """The finisher of splitmix64 (Steele et al. 2014). The least of many hashes is small: mixed again, it is even."""
    value = (value ^ value >> np.uint64(30)) * _FIRST
    value = (value ^ value >> np.uint64(27)) * _SECOND
    return value ^ value >> np.uint64(31)


@njit(cache=True, nogil=True)
def spell(tokens: npt.NDArray[Any], letters: Bytes, bounds: Offsets, out: Bytes, ends: Offsets) -> None:
    """The bytes of tokens to `out` and where each ends to `ends`; token t is `letters[bounds[t] : bounds[t + 1]]`."""
    written = 0
    for place in range(len(tokens)):
        for letter in range(bounds[tokens[place]], bounds[tokens[place] + 1]):
            out[written] = letters[letter]
            written += 1
        ends[place] = written


@njit(cache=True, nogil=True)
def word_spans(
    data: Bytes, offsets: Offsets, classes: Classes, folds: Folds
) -> tuple[Values, Offsets, Offsets, Offsets]:
    """(hash, start, stop, first word of each document): the words of texts as `words.word_hashes` has them, with the
    bytes where they lie."""
    documents = len(offsets) - 1
    most = (offsets[documents] - offsets[0] + documents) // 2 + 1
    hashes, begins, ends = np.empty(most, np.uint64), np.empty(most, np.int64), np.empty(most, np.int64)
    firsts = np.zeros(documents + 1, np.int64)
    found = 0
    for document in range(documents):
        place, stop = offsets[document], offsets[document + 1]
        inside = False
        state, unsegmented = SEED, np.int64(0)
        while place < stop:
            here = place
            code, place = decode(data, place, stop)
            bits = np.int64(classes[code])
            if inside and not extends(bits, unsegmented):
                hashes[found], ends[found] = finished(state), here
                found += 1
                inside = False
            if inside:
                state = added(state, code, bits, folds)
            elif bits & START:
                inside = True
                begins[found] = here
                state = added(SEED, code, bits, folds)
                unsegmented = bits & UNSEGMENTED
        if inside:
            hashes[found], ends[found] = finished(state), stop
            found += 1
        firsts[document + 1] = found
    return hashes[:found], begins[:found], ends[:found], firsts
