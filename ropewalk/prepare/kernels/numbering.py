"""Equal items get equal numbers; what repeats is then counted without looking at the items again.

An n-gram can repeat only where both (n-1)-grams inside it repeat. So n-grams are numbered level by level, each named
exactly by the numbers of its two halves, and a level looks only at the positions that are left: in prose that makes two
probes of a hash table a word for n = 1 to 10 together, instead of ten.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from .words import Hashes

Counts = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Numbering(NamedTuple):
    """Room for the numbers of a document's items, used again for every list and every level."""

    table: Numbers
    """A hash table of numbers; -1 is free."""
    ids: Numbers
    """The number of each item."""
    firsts: Numbers
    """Where each number stood first."""
    counts: Numbers
    """How often each number stands."""
    positions: Numbers
    """The word at which each n-gram of a level begins."""
    pairs: Hashes
    """The n-grams of a level, each as the numbers of its two halves."""


@njit(cache=True, nogil=True)
def make_numbering(room: int) -> Numbering:
    """For up to `room` items."""
    slots = 16
    while slots < 2 * room:
        slots *= 2
    return Numbering(
        np.empty(slots, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.uint64),
    )


@njit(cache=True, nogil=True)
def number(keys: Hashes, count: int, numbering: Numbering) -> int:
    """Numbers the first `count` keys in the order in which they first appear, and returns how many differ."""
    table, ids, firsts, counts = numbering.table, numbering.ids, numbering.firsts, numbering.counts
    bits = 4
    while 1 << bits < 2 * count:
        bits += 1
    shift = np.uint64(64 - bits)
    last_slot = (1 << bits) - 1
    table[: last_slot + 1] = -1
    distinct = 0
    for k in range(count):
        key = keys[k]
        slot = np.int64((key * _GOLDEN) >> shift)
        found = np.int64(table[slot])
        while found >= 0 and keys[firsts[found]] != key:
            slot = (slot + 1) & last_slot
            found = np.int64(table[slot])
        if found < 0:
            found = np.int64(distinct)
            table[slot] = found
            firsts[found] = k
            counts[found] = 0
            distinct += 1
        ids[k] = found
        counts[found] += 1
    return distinct


@njit(cache=True, nogil=True)
def count_copies(sizes: Counts, count: int, numbering: Numbering) -> tuple[int, int]:
    """How many of `count` numbered items equal an earlier one, and their size together."""
    copies = total = 0
    for k in range(count):
        if numbering.firsts[numbering.ids[k]] != k:
            copies += 1
            total += sizes[k]
    return copies, total


@njit(cache=True, nogil=True)
def narrow(left: int, numbering: Numbering) -> int:
    """Pairs of neighbours that both repeat, out of the `left` numbered n-grams; returns how many there are.

    They are the (n+1)-grams that may repeat: their keys are in `pairs` and the words they begin at in `positions`.
    """
    ids, counts, positions, pairs = numbering.ids, numbering.counts, numbering.positions, numbering.pairs
    candidates = 0
    for k in range(left - 1):
        # No branch: which of them stay is as good as random.
        pairs[candidates] = np.uint64(ids[k]) << np.uint64(32) | np.uint64(ids[k + 1])
        position = positions[k]
        together = positions[k + 1] == position + 1
        positions[candidates] = position
        candidates += together & (counts[ids[k]] > 1) & (counts[ids[k + 1]] > 1)
    return candidates


@njit(cache=True, nogil=True)
def top_characters(sizes: Counts, joints: Counts, n: int, distinct: int, numbering: Numbering) -> int:
    """Characters in all places of the most frequent n-gram, spaces between its words included; of several the first."""
    most, first = 1, 0
    for k in range(distinct):
        if numbering.counts[k] > most:
            most, first = numbering.counts[k], numbering.positions[numbering.firsts[k]]
    spaces = n - 1 - (joints[first + n] - joints[first + 1])
    return most * (sizes[first + n] - sizes[first] + spaces)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def duplicate_characters(sizes: Counts, n: int, left: int, numbering: Numbering) -> int:
    """Characters of words in n-grams that stood before, read from the left, each counted once. `firsts` is lost."""
    ids, seen = numbering.ids, numbering.firsts
    total = free = 0
    for k in range(left):
        position = numbering.positions[k]
        if position < free:
            continue
        if seen[ids[k]] < 0:
            total += sizes[position + n] - sizes[position]
            free = position + n
        else:
            seen[ids[k]] = -1
    return total
