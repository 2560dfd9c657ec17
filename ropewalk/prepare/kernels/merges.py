"""Byte-pair merges: a vocabulary as tables, and the merging of a piece by rank (Sennrich et al. 2016)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..columns import Bytes, Offsets
from .compile import compiled, inlined

Words = npt.NDArray[np.uint64]
Units = npt.NDArray[np.uint32]
Out = npt.NDArray[Any]

DOUBTFUL, UNKNOWN = 16, 32
"""Flags of characters: a token may join a part of the character before to this one or to a part of it; the kind is not
known, so that a document with this character is left to the caller."""
FILTER_BITS = 18
"""32 KiB, as much as the nearest cache of a processor: with 800 joins 0.3 % of the pairs that do not merge pass, with
20,000 7 %. 8 and 16 KiB are no faster."""
TOKEN_BITS = 20
"""Of a token's id."""
PACKED_CODES = 1 << 16

UNIT_BITS = 12
"""Of the flags in a unit of a run, which is token << UNIT_BITS | flags: those below and the kind << 1."""
UNIT_DOUBTFUL, UNIT_KIND, UNIT_STOPS, UNIT_THREE = 1, 3 << 1, 8, 16
"""DOUBTFUL; the bits of the kind; no character of a run; a character of three tokens."""
UNIT_MORE_BIT = 5
"""Set for a character of two tokens or three."""
GROUP = 8
"""Ranks that are compared at once; arrays of them are filled up to a multiple."""

FACTOR = np.uint64(0x9E3779B97F4A7C15)
NONE = np.uint64(0xFFFFFFFFFFFFFFFF)
_PLACE_BITS = np.uint64(16)
_RANK_BITS = np.uint64(24)
_RANK = np.uint64(0xFFFFFF)


class Tables(NamedTuple):
    """A vocabulary as the kernels read it."""

    characters: Units
    """By code point: value << 6 | UNKNOWN | DOUBTFUL | (tokens - 1) << 2 | kind. The value is the character's token, or
    the code point where it takes several."""
    parts: Units
    """The tokens of each character, four places a code point."""
    packed: Words
    """Both of the two for the first PACKED_CODES, as two units, the first one lower. The flags are those of the first,
    but for the kind, which both have."""
    single: Units
    """The token of each byte."""
    pairs: Words
    """Merges by open addressing, the size a power of two: left << 44 | right << 24 | rank; all ones where empty."""
    merged: Units
    """The token of each merge, by rank."""
    joins: Words
    """Those of `pairs` that join whole characters of a run, in the same way: so few that they stay in a cache."""
    filter: Words
    """One bit for the hash of the two units of each join."""
    borders: Words
    """By the first byte of a character, a bit for each last byte & 63 of the one before: whether a token may join a
    part of one to the other. ASCII before counts as the byte that has its lowest bits, which only costs time."""


class Room(NamedTuple):
    """What is noted about the units of a piece while they merge."""

    ranks: Words
    """Of each unit with the next one, rank << 16 | place; all ones where they do not merge."""
    next: Offsets
    """The place of the unit behind."""
    last: Offsets
    """The place of the unit before."""


@compiled
def fill_pairs(left: Units, right: Units, ranks: Offsets, pairs: Words) -> bool:
    """Enters merges into an empty table; False when a pair stands there twice."""
    mask = len(pairs) - 1
    for index in range(len(left)):
        key = np.uint64(left[index]) << np.uint64(TOKEN_BITS) | np.uint64(right[index])
        slot = np.int64(key * FACTOR >> _RANK_BITS) & mask
        while pairs[slot] != NONE:
            if pairs[slot] >> _RANK_BITS == key:
                return False
            slot = (slot + 1) & mask
        pairs[slot] = key << _RANK_BITS | np.uint64(ranks[index])
    return True


@compiled
def fill_filter(left: Units, right: Units, filter: Words) -> None:
    """Lets pairs of units pass."""
    for index in range(len(left)):
        bit = _filter_bit(np.uint64(left[index]), np.uint64(right[index]))
        filter[bit >> np.uint64(6)] |= np.uint64(1) << (bit & np.uint64(63))


@compiled
def fill_characters(kinds: npt.NDArray[np.uint8], tables: Tables, data: Bytes, room: Room) -> None:
    """Enters every code point into `characters` and `parts`, encoded by itself; merges are there already.

    `data` has room for a character.
    """
    for code in range(len(kinds)):
        size = _encode_utf8(code, data)
        if size:
            for place in range(size):
                tables.parts[4 * code + place] = tables.single[data[place]]
            count = merge(tables.parts, 4 * code, size, room, tables.pairs, tables.merged)
            value = np.int64(tables.parts[4 * code]) if count == 1 else code
            tables.characters[code] = value << 6 | (count - 1) << 2 | kinds[code]


@compiled
def encode_bytes(data: Bytes, begin: int, after: int, tables: Tables, room: Room, out: Out, written: int) -> int:
    """How many tokens the bytes from `begin` to `after` have, which are written."""
    for place in range(after - begin):
        out[written + place] = tables.single[data[begin + place]]
    return merge(out, written, after - begin, room, tables.pairs, tables.merged)


@compiled
def merge(tokens: Out, start: int, count: int, room: Room, pairs: Words, merged: Units) -> int:
    """Merges `count` tokens from `start` on in place, the pair of lowest rank first, the leftmost of equals, until none
    is left; how many remain.

    A token that merges into the one before leaves its place empty; the places are closed at the end. To find the lowest
    of up to eight ranks takes no branch, and most pieces have no more.
    """
    ranks, next, last = room.ranks, room.next, room.last
    groups = (count + GROUP - 2) // GROUP
    for place in range(count - 1):
        ranks[place] = _ranked(tokens, start, place, place + 1, pairs)
    for place in range(count - 1, groups * GROUP):
        ranks[place] = NONE
    for place in range(count):
        next[place], last[place] = place + 1, place - 1
    while True:
        best = NONE
        for group in range(groups):
            best = min(best, _least(ranks, group * GROUP))
        if best == NONE:
            break
        at = np.int64(best & (np.uint64(1) << _PLACE_BITS) - np.uint64(1))
        tokens[start + at] = merged[np.int64(best >> _PLACE_BITS)]
        behind = next[next[at]]
        ranks[next[at]] = NONE
        next[at] = behind
        ranks[at] = NONE
        if behind < count:
            last[behind] = at
            ranks[at] = _ranked(tokens, start, at, behind, pairs)
        if at > 0:
            ranks[last[at]] = _ranked(tokens, start, last[at], at, pairs)
    number = place = 0
    while place < count:
        tokens[start + number] = tokens[start + place]
        number += 1
        place = next[place]
    return number


@inlined
def pair(left: Any, right: Any, pairs: Words) -> Any:
    """The rank of a merge of two tokens, NONE for a pair that does not merge."""
    key = np.uint64(left << TOKEN_BITS | right)
    mask = len(pairs) - 1
    slot = np.int64(key * FACTOR >> _RANK_BITS) & mask
    entry = pairs[slot]
    while entry >> _RANK_BITS != key and entry != NONE:
        slot = (slot + 1) & mask
        entry = pairs[slot]
    return NONE if entry == NONE else entry & _RANK


@inlined
def may_join(left: Any, right: Any, filter: Words) -> Any:
    """1 when the filter lets two units (uint64) without other flags than their kind pass, else 0."""
    bit = _filter_bit(left, right)
    return filter[bit >> np.uint64(6)] >> (bit & np.uint64(63)) & np.uint64(1)


@inlined
def _filter_bit(left: Any, right: Any) -> Any:
    return (left << np.uint64(32) | right) * FACTOR >> np.uint64(64 - FILTER_BITS)


@inlined
def _ranked(tokens: Out, start: int, left: Any, right: Any, pairs: Words) -> Any:
    """The rank of the tokens at two places, with the place of the left one."""
    rank = pair(np.int64(tokens[start + left]), np.int64(tokens[start + right]), pairs)
    return NONE if rank == NONE else rank << _PLACE_BITS | np.uint64(left)


@inlined
def _least(ranks: Words, place: int) -> Any:
    """The lowest of eight."""
    low = min(min(ranks[place], ranks[place + 1]), min(ranks[place + 2], ranks[place + 3]))
    high = min(min(ranks[place + 4], ranks[place + 5]), min(ranks[place + 6], ranks[place + 7]))
    return min(low, high)


@compiled
def _encode_utf8(code: int, data: Bytes) -> int:
    """The bytes of a code point to `data`; how many, 0 for a surrogate."""
    if code < 0x80:
        data[0] = code
        return 1
    if code < 0x800:
        data[0], data[1] = 0xC0 | code >> 6, 0x80 | code & 0x3F
        return 2
    if code < 0x10000:
        if 0xD800 <= code < 0xE000:
            return 0
        data[0], data[1], data[2] = 0xE0 | code >> 12, 0x80 | code >> 6 & 0x3F, 0x80 | code & 0x3F
        return 3
    data[0], data[1] = 0xF0 | code >> 18, 0x80 | code >> 12 & 0x3F
    data[2], data[3] = 0x80 | code >> 6 & 0x3F, 0x80 | code & 0x3F
    return 4
