"""The unigram language model of tokens (Kudo 2018): expected counts, best segmentations, second-best ones.

Words are byte strings, each with its number of occurrences. A token is found by the hash of its bytes: 64 bits, so that
among a million tokens and a billion lookups one is mistaken for another with a chance of 5e-5. Sums go over words in
the order given, on one thread, so that the same words give the same numbers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Offsets

Scores = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]

LONGEST = 16
"""Bytes of a token at most, as in SentencePiece (there: characters)."""
WORD_LIMIT = 128
"""Longer words are not learned from."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = np.uint64(0)


class Vocabulary(NamedTuple):
    """Tokens by hash: open addressing, the size a power of two."""

    hashes: Hashes
    """0 where empty."""
    ids: Ids
    scores: Scores
    """Logarithm of the probability, by id."""


class Path(NamedTuple):
    """The best way to every place of a word."""

    scores: Scores
    tokens: Ids
    """The last token,"""
    lengths: Ids
    """and its bytes."""


@njit(cache=True, nogil=True)
def hash_tokens(data: Bytes, offsets: Offsets) -> Hashes:
    """The hash of each byte string, as the lattices look it up."""
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for token in range(len(offsets) - 1):
        hashed = np.uint64(0)
        for place in range(offsets[token], offsets[token + 1]):
            hashed = _step(hashed, data[place])
        hashes[token] = hashed
    return hashes


@njit(cache=True, nogil=True)
def enter(hashes: Hashes, slots: Hashes, ids: Ids) -> None:
    """Enters tokens 0, 1, ... into an empty table."""
    for token in range(len(hashes)):
        slot = _slot(hashes[token], len(slots))
        while slots[slot] != _EMPTY:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot], ids[slot] = hashes[token], token


@njit(cache=True, nogil=True)
def substrings(data: Bytes, offsets: Offsets, counts: Ids) -> tuple[Hashes, Ids, Ids, Ids]:
    """(hash, weight, start, length) of every substring of 2 to LONGEST bytes of every word that begins and ends between
    characters; the weight is the word's count."""
    total = 0
    for word in range(len(offsets) - 1):
        size = offsets[word + 1] - offsets[word]
        total += size * min(size, LONGEST)
    hashes, weights = np.empty(total, np.uint64), np.empty(total, np.int64)
    starts, lengths = np.empty(total, np.int64), np.empty(total, np.int64)
    found = 0
    for word in range(len(offsets) - 1):
        stop = offsets[word + 1]
        for start in range(offsets[word], stop):
            if data[start] & 0xC0 == 0x80:
                continue
            hashed = np.uint64(0)
            for place in range(start, min(stop, start + LONGEST)):
                hashed = _step(hashed, data[place])
                ends = place + 1 == stop or data[place + 1] & 0xC0 != 0x80
                if ends and place > start:
                    hashes[found], weights[found] = hashed, counts[word]
                    starts[found], lengths[found] = start, place + 1 - start
                    found += 1
    return hashes[:found], weights[:found], starts[:found], lengths[:found]


@njit(cache=True, nogil=True)
def expect(data: Bytes, offsets: Offsets, counts: Ids, vocabulary: Vocabulary) -> tuple[Scores, float]:
    """(expected count of each token, log-likelihood of all words) under the model: forward and backward."""
    expected = np.zeros(len(vocabulary.scores))
    edges = np.empty((WORD_LIMIT, LONGEST), np.int64)
    before, behind = np.empty(WORD_LIMIT + 1), np.empty(WORD_LIMIT + 1)
    likelihood = 0.0
    for word in range(len(offsets) - 1):
        begin, size = offsets[word], offsets[word + 1] - offsets[word]
        before[: size + 1] = -np.inf
        before[0] = 0.0
        for start in range(size):
            _find(data, begin + start, begin + size, vocabulary, edges[start])
            for length in range(1, min(LONGEST, size - start) + 1):
                token = edges[start, length - 1]
                if token >= 0:
                    reached = before[start] + vocabulary.scores[token]
                    before[start + length] = _add(before[start + length], reached)
        behind[: size + 1] = -np.inf
        behind[size] = 0.0
        for start in range(size - 1, -1, -1):
            for length in range(1, min(LONGEST, size - start) + 1):
                token = edges[start, length - 1]
                if token >= 0:
                    score = vocabulary.scores[token] + behind[start + length]
                    behind[start] = _add(behind[start], score)
                    expected[token] += counts[word] * math.exp(before[start] + score - before[size])
        likelihood += counts[word] * before[size]
    return expected, likelihood


@njit(cache=True, nogil=True)
def segment(data: Bytes, offsets: Offsets, counts: Ids, vocabulary: Vocabulary) -> Scores:
    """How often each token occurs in the best segmentations of all words."""
    used = np.zeros(len(vocabulary.scores))
    path = Path(np.empty(WORD_LIMIT + 1), np.empty(WORD_LIMIT + 1, np.int64), np.empty(WORD_LIMIT + 1, np.int64))
    for word in range(len(offsets) - 1):
        begin, place = offsets[word], offsets[word + 1] - offsets[word]
        _walk(data, begin, begin + place, vocabulary, -1, path)
        while place > 0:
            used[path.tokens[place]] += counts[word]
            place -= path.lengths[place]
    return used


@njit(cache=True, nogil=True)
def alternatives(data: Bytes, offsets: Offsets, vocabulary: Vocabulary) -> tuple[Ids, Offsets]:
    """(tokens, starts): the best segmentation of each token without the token itself; none where there is none."""
    tokens = np.empty(offsets[-1], np.int64)
    starts = np.zeros(len(offsets), np.int64)
    path = Path(np.empty(LONGEST + 1), np.empty(LONGEST + 1, np.int64), np.empty(LONGEST + 1, np.int64))
    written = 0
    for token in range(len(offsets) - 1):
        begin, place = offsets[token], offsets[token + 1] - offsets[token]
        _walk(data, begin, begin + place, vocabulary, token, path)
        while place > 0 and path.scores[place] > -np.inf:
            tokens[written] = path.tokens[place]
            written += 1
            place -= path.lengths[place]
        starts[token + 1] = written
    return tokens[:written], starts


@njit(cache=True, nogil=True)
def _walk(data: Bytes, begin: int, stop: int, vocabulary: Vocabulary, forbidden: int, path: Path) -> None:
    """The best path to every place of a byte string, without the token `forbidden` (Viterbi)."""
    size = stop - begin
    found = np.empty(LONGEST, np.int64)
    path.scores[: size + 1] = -np.inf
    path.scores[0] = 0.0
    for start in range(size):
        _find(data, begin + start, stop, vocabulary, found)
        for length in range(1, min(LONGEST, size - start) + 1):
            token = found[length - 1]
            if token >= 0 and token != forbidden:
                score = path.scores[start] + vocabulary.scores[token]
                if score > path.scores[start + length]:
                    path.scores[start + length] = score
                    path.tokens[start + length], path.lengths[start + length] = token, length


@njit(cache=True, nogil=True)
def _find(data: Bytes, start: int, stop: int, vocabulary: Vocabulary, found: Ids) -> None:
    """The token of each length that begins at `start`, -1 where there is none."""
    hashed = np.uint64(0)
    mask = len(vocabulary.hashes) - 1
    for length in range(1, min(LONGEST, stop - start) + 1):
        hashed = _step(hashed, data[start + length - 1])
        slot = _slot(hashed, len(vocabulary.hashes))
        while vocabulary.hashes[slot] != _EMPTY and vocabulary.hashes[slot] != hashed:
            slot = (slot + 1) & mask
        found[length - 1] = vocabulary.ids[slot] if vocabulary.hashes[slot] == hashed else -1


@njit(cache=True, nogil=True)
def _step(hashed: Any, byte: Any) -> Any:
    mixed = (hashed ^ np.uint64(byte + 1)) * _FACTOR
    return mixed ^ mixed >> np.uint64(29)


@njit(cache=True, nogil=True)
def _slot(hashed: Any, slots: int) -> Any:
    return np.int64(hashed >> np.uint64(8)) & (slots - 1)


@njit(cache=True, nogil=True)
def _add(one: float, other: float) -> float:
    """log(exp(one) + exp(other))."""
    if one == -np.inf:
        return other
    return max(one, other) + math.log1p(math.exp(-abs(one - other)))
