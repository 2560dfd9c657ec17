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

DOUBTFUL_BIT = 4
DOUBTFUL, UNKNOWN = 1 << DOUBTFUL_BIT, 32
"""Flags of characters: a token may join a part of the character before to this one or to a part of it; the kind is not
known, so that a document with this character is left to the caller."""
STOPS = 64
"""Flag in `packed`: a run of characters ends here, at white space or where its tokens have no place."""

FILTER_BITS = 18
"""32 KiB, as much as the nearest cache of a processor: with 4,000 merges 1.5 % of the pairs that do not merge pass."""
TOKEN_BITS, PART_BITS = 20, 19
"""Of a token's id; of one in `packed`."""
PACKED_CODES = 1 << 16
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
    """Both of the two for the first PACKED_CODES: flags << 57, that is to say STOPS | UNKNOWN | DOUBTFUL |
    (tokens - 1) << 2 | kind, and three tokens of 19 bits, the first one lowest."""
    single: Units
    """The token of each byte."""
    pairs: Words
    """Merges by open addressing, the size a power of two: left << 44 | right << 24 | rank; all ones where empty."""
    merged: Units
    """The token of each merge, by rank."""
    filter: Words
    """One bit for the hash of each merge that joins characters which are not ASCII."""
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
def fill_merges(left: Units, right: Units, merged: Units, wide: npt.NDArray[np.bool_], tables: Tables) -> bool:
    """Enters the merges in order of rank into `pairs` and `merged`, and the `wide` ones, which join characters that are
    not ASCII, into `filter`; False when a pair stands there twice."""
    mask = len(tables.pairs) - 1
    for rank in range(len(left)):
        key = np.uint64(left[rank]) << np.uint64(TOKEN_BITS) | np.uint64(right[rank])
        mixed = key * FACTOR
        if wide[rank]:
            bit = mixed >> np.uint64(64 - FILTER_BITS)
            tables.filter[np.int64(bit >> np.uint64(6))] |= np.uint64(1) << (bit & np.uint64(63))
        slot = np.int64(mixed >> _RANK_BITS) & mask
        while tables.pairs[slot] != NONE:
            if tables.pairs[slot] >> _RANK_BITS == key:
                return False
            slot = (slot + 1) & mask
        tables.pairs[slot] = key << _RANK_BITS | np.uint64(rank)
        tables.merged[rank] = merged[rank]
    return True


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
            count = merge(tables.parts, 4 * code, size, room, tables)
            value = np.int64(tables.parts[4 * code]) if count == 1 else code
            tables.characters[code] = value << 6 | (count - 1) << 2 | kinds[code]


@compiled
def encode_bytes(data: Bytes, begin: int, after: int, tables: Tables, room: Room, out: Out, written: int) -> int:
    """How many tokens the bytes from `begin` to `after` have, which are written."""
    for place in range(after - begin):
        out[written + place] = tables.single[data[begin + place]]
    return merge(out, written, after - begin, room, tables)


@compiled
def merge(units: Out, start: int, count: int, room: Room, tables: Tables) -> int:
    """Merges `count` units from `start` on in place, the pair of lowest rank first, the leftmost of equals, until none
    is left; how many remain.

    A unit that merges into the one before leaves its place empty; the places are closed at the end. To find the lowest
    of up to eight ranks takes no branch, and most pieces have no more.
    """
    ranks, next, last = room.ranks, room.next, room.last
    groups = (count + GROUP - 2) // GROUP
    for place in range(count - 1):
        ranks[place] = _ranked(units, start, place, place + 1, tables)
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
        units[start + at] = tables.merged[np.int64(best >> _PLACE_BITS)]
        behind = next[next[at]]
        ranks[next[at]] = NONE
        next[at] = behind
        ranks[at] = NONE
        if behind < count:
            last[behind] = at
            ranks[at] = _ranked(units, start, at, behind, tables)
        if at > 0:
            ranks[last[at]] = _ranked(units, start, last[at], at, tables)
    number = place = 0
    while place < count:
        units[start + number] = units[start + place]
        number += 1
        place = next[place]
    return number


@inlined
def pair(left: np.int64, right: np.int64, tables: Tables) -> Any:
    """The rank of a merge, NONE for a pair that does not merge."""
    key = np.uint64(left << TOKEN_BITS | right)
    mask = len(tables.pairs) - 1
    slot = np.int64(key * FACTOR >> _RANK_BITS) & mask
    entry = tables.pairs[slot]
    while entry >> _RANK_BITS != key and entry != NONE:
        slot = (slot + 1) & mask
        entry = tables.pairs[slot]
    return NONE if entry == NONE else entry & _RANK


@inlined
def may_merge(left: np.int64, right: np.int64, filter: Words) -> Any:
    """1 when the filter lets a pair of units of a run pass, else 0."""
    bit = np.uint64(left << TOKEN_BITS | right) * FACTOR >> np.uint64(64 - FILTER_BITS)
    return filter[bit >> np.uint64(6)] >> (bit & np.uint64(63)) & np.uint64(1)


@inlined
def _ranked(units: Out, start: int, left: Any, right: Any, tables: Tables) -> Any:
    """The rank of the units at two places, with the place of the left one."""
    rank = pair(np.int64(units[start + left]), np.int64(units[start + right]), tables)
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
