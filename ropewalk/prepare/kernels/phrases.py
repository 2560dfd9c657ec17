"""Words and phrases that a pass takes note of: a hash table from their hashes to bits that say what they are.

A word's own bits stand under its hash, together with the lengths of the phrases that end with it; a phrase's bits
stand under a key made of the hashes of its words. So a text is searched for any number of phrases at one probe a word,
and one more where a phrase may end.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from ropewalk.base.errors import UserError

from .words import FACTOR, SEED, Hashes, finished, hashes_of

KINDS = 48
"""Bits that callers may give a meaning."""
PHRASE_WORDS = 8
"""Most words in a phrase."""
LENGTHS = np.int64(((1 << PHRASE_WORDS + 1) - 1) << KINDS)
"""Bit KINDS + n of a word: a phrase of n words ends with it."""

Bits = npt.NDArray[np.int64]


class Phrases(NamedTuple):
    """An open hash table; a slot whose bits are 0 is free."""

    keys: Hashes
    bits: Bits


def make_phrases(entries: Iterable[tuple[str, int]]) -> Phrases:
    """The table of (phrase, its bits below 2**KINDS); UserError for one without words or with too many."""
    pairs = list(entries)
    found: dict[int, int] = collections.defaultdict(int)
    for words, (phrase, bits) in zip(hashes_of([phrase for phrase, _ in pairs]), pairs, strict=True):
        if not 0 < len(words) <= PHRASE_WORDS:
            raise UserError(f"the phrase {phrase!r} has {len(words)} words; write one to {PHRASE_WORDS}")
        assert 0 < bits < 1 << KINDS
        if len(words) == 1:
            found[words[0]] |= bits
        else:
            found[words[-1]] |= 1 << KINDS + len(words)
            found[phrase_hash(words)] |= bits
    slots = 1024
    while slots < 4 * len(found):
        slots *= 2
    keys, values = np.zeros(slots, np.uint64), np.zeros(slots, np.int64)
    shift = 65 - slots.bit_length()
    for key, bits in found.items():
        slot = key >> shift
        while values[slot]:
            slot = (slot + 1) % slots
        keys[slot], values[slot] = key, bits
    for table in (keys, values):
        table.flags.writeable = False
    return Phrases(keys, values)


def phrase_hash(words: Sequence[int]) -> int:
    """The key of a phrase, from the hashes of its words."""
    return int(_phrase_key(np.array(words, np.uint64), 0, len(words)))


@njit(cache=True, nogil=True)
def look_up(keys: Hashes, bits: Bits, key: np.uint64) -> np.int64:
    """The bits of a word or a phrase; 0 for one that is not in the table."""
    last = keys.size - 1
    slot = np.int64((key >> np.uint64(32)) * np.uint64(keys.size) >> np.uint64(32))
    while bits[slot] and keys[slot] != key:
        slot = (slot + 1) & last
    return bits[slot]  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def phrases_at(keys: Hashes, bits: Bits, words: Hashes, first: int, last: int) -> np.int64:
    """The bits of all that ends with word `last` and begins no earlier than word `first`."""
    own = look_up(keys, bits, words[last])
    found = own & ~LENGTHS
    for length in range(2, min(PHRASE_WORDS, last - first + 1) + 1):
        if own >> (KINDS + length) & 1:
            found |= look_up(keys, bits, _phrase_key(words, last - length + 1, last + 1))
    return found


@njit(cache=True, nogil=True)
def phrase_start(keys: Hashes, bits: Bits, words: Hashes, first: int, last: int, kinds: int) -> int:
    """Where the longest phrase with one of `kinds` begins that ends with word `last`; -1 for none."""
    own = look_up(keys, bits, words[last])
    for length in range(min(PHRASE_WORDS, last - first + 1), 1, -1):
        if own >> (KINDS + length) & 1:
            key = _phrase_key(words, last - length + 1, last + 1)
            if look_up(keys, bits, key) & kinds:
                return last - length + 1
    return last if own & kinds else -1


@njit(cache=True, nogil=True)
def _phrase_key(words: Hashes, first: int, end: int) -> np.uint64:
    state = SEED
    for k in range(first, end):
        state = (state ^ words[k]) * FACTOR
    return finished(state)  # type: ignore[no-any-return]
