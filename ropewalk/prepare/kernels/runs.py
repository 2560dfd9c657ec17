"""Runs of Han, kana and other characters of three bytes, with ASCII punctuation and single line feeds between them.

Three loops over a run, each with few branches, since what characters do cannot be predicted:

- Characters become units, which are tokens with flags. Most characters are one token, rare ones two or three.
- A bit filter tells which neighbours may merge. Those that do are few: as characters are encoded by themselves, only
  merges of whole characters are left, 800 of the 16,000 in a vocabulary trained on English, Chinese and code.
- The units become tokens, and those that merge are merged. Most merge by themselves.

Pieces are not remembered: in Chinese they hardly ever come back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..columns import Bytes, Offsets
from .compile import compiled, inlined
from .lanes import put_word, word_at
from .merges import (
    NONE,
    TOKEN_BITS,
    UNIT_BITS,
    UNIT_DOUBTFUL,
    UNIT_KIND,
    UNIT_MORE_BIT,
    UNIT_STOPS,
    UNIT_THREE,
    Out,
    Room,
    Tables,
    Units,
    Words,
    may_join,
    merge,
    pair,
)
from .pattern import SPACE, decode

PIECE_LIMIT = 256
"""Tokens of a piece at most before they merge, which is quadratic."""
RUN_BYTES = 3072
COPIED = 64
"""Tokens that are copied at once between two merges. With 16, which are often too few, the kernel takes 15 % longer."""
UNITS = RUN_BYTES + COPIED + 8
"""Room for the units of a run, which are no more than its bytes, and for what is read and written around them."""

_SPACES = np.uint64(2 * (SPACE << 1))
"""The kinds of two line feeds, added: none is greater."""
_SIX, _MIDDLE = np.uint64(63), np.uint64(63 << 6)
"""Bits of a code point that the last of three bytes holds, and the second one."""
_KIND, _STOPS, _THREE = np.uint64(UNIT_KIND), np.uint64(UNIT_STOPS), np.uint64(UNIT_THREE)
_RARE, _DOUBTFUL = np.uint64(UNIT_STOPS | UNIT_THREE), np.uint64(UNIT_DOUBTFUL)
_PLAIN = np.uint64(((1 << TOKEN_BITS) - 1) << UNIT_BITS | UNIT_KIND)
"""A unit without its other flags."""
_SHIFT = np.uint64(UNIT_BITS)
_ONE, _TWO = np.uint64(1), np.uint64(2)
_BORDER = np.uint32(SPACE << 1)
"""A unit that merges with none, before the first and behind the last one."""


@inlined
def encode_run(
    data: Bytes,
    begin: int,
    stop: int,
    tables: Tables,
    units: Units,
    joining: Offsets,
    room: Room,
    out: Out,
    written: int,
) -> tuple[Any, Any]:
    """(end, number of tokens, which are written) of the whole pieces from `begin` on that belong to a run and have no
    doubtful border; 0 tokens when the first piece is none of these."""
    after, count = _write_units(data, begin, stop, tables.packed, tables.parts, tables.borders, units)
    if after < stop:
        after, count = _whole_pieces(data, begin, after, count, tables.characters)
    units[count + 1] = _BORDER
    found = _find_joins(units, count, tables.filter, joining)
    return after, _write_tokens(units, count, joining, found, tables, room, out, written)


@compiled
def _write_units(
    data: Bytes, begin: int, stop: int, packed: Words, parts: Units, borders: Words, units: Units
) -> tuple[Any, Any]:
    """(end, units) of a run, which are written from the second place on; it ends anywhere in a piece."""
    place = np.int64(begin)
    last = min(stop, len(data) - 7, begin + RUN_BYTES)
    units[0] = _BORDER
    # Unsigned: numba lets negative indices count from the end, which costs a select each.
    count, tail = _ONE, np.uint64(0)
    while place < last:
        word = word_at(data, place)
        byte = word & np.uint64(0xFF)
        if byte & np.uint64(0xF0) != np.uint64(0xE0):
            if byte >= np.uint64(0x80):
                break
            entry = packed[byte]
            if entry & _STOPS or (entry & _KIND) + (units[count - _ONE] & _KIND) == _SPACES:
                break
            units[count] = entry
            tail = byte
            count += _ONE
            place += 1
            continue
        code = (word & np.uint64(0xF)) << np.uint64(12) | word >> _TWO & _MIDDLE | word >> np.uint64(16) & _SIX
        entry = packed[code]
        # Two units, whether there are as many: that cannot be predicted. What is too much is written over.
        put_word(units, np.int64(count), entry)
        # Every twelfth character of Chinese is doubtful, but few of them are so behind the one before.
        border = borders[byte] >> (tail & _SIX) & _DOUBTFUL
        if entry & (_RARE | border):
            if entry & _STOPS or (entry & border and (entry ^ units[count - _ONE]) & _KIND == 0):
                break
            if entry & _THREE:
                units[count + _TWO] = np.uint64(parts[np.uint64(4) * code + _TWO]) << _SHIFT | entry & _KIND
                count += _ONE
        tail = word >> np.uint64(16)
        count += (entry >> np.uint64(UNIT_MORE_BIT) & _ONE) + _ONE
        place += 3
    return place, np.int64(count - _ONE)


@inlined
def _whole_pieces(data: Bytes, begin: int, after: int, count: Any, characters: Units) -> tuple[Any, Any]:
    """The end and the units of a run without its last piece, if that goes on behind `after`."""
    kind = characters[decode(data, after)[0]] & 3
    while after > begin:
        before = after - 1
        while data[before] & 0xC0 == 0x80:
            before -= 1
        character = characters[decode(data, before)[0]]
        if character & 3 != kind:
            break
        after = before
        count -= (np.int64(character) >> 2 & 3) + 1
    return after, count


@inlined
def _find_joins(units: Units, count: Any, filter: Words, joining: Offsets) -> Any:
    """Writes which units may merge with the one before; how many."""
    found = np.uint64(0)
    before = np.uint64(_BORDER)
    for place in range(_ONE, np.uint64(count) + _ONE):
        unit = np.uint64(units[place]) & _PLAIN
        joining[found] = place
        found += may_join(before, unit, filter)
        before = unit
    return np.int64(found)


@inlined
def _write_tokens(
    units: Units, count: Any, joining: Offsets, found: Any, tables: Tables, room: Room, out: Out, written: int
) -> Any:
    """Writes the tokens of a run; how many they are, 0 when a piece is too long.

    Two units merge at once where neither they nor what they become can merge with a neighbour: no order of merges
    matters then. Otherwise their whole piece is merged by rank.
    """
    done: Any = 1
    number: Any = written
    joined: Any = 0
    for index in range(found):
        place: Any = np.int64(joining[index])
        if place < done:
            continue
        left, right, following = _plain(units, place - 1), _plain(units, place), _plain(units, place + 1)
        rank = pair(left >> _SHIFT, right >> _SHIFT, tables.joins)
        if rank == NONE:
            continue
        number = _copy(units, done, place, out, number)
        done = place
        token = np.uint64(tables.merged[np.int64(rank)])
        unit, before = token << _SHIFT | left & _KIND, np.uint64(out[number - 2]) << _SHIFT | left & _KIND
        # Without branches, since none of the answers can be predicted. What is before may be of another piece: then the
        # piece is merged by rank for nothing, at times.
        merges = (
            may_join(before, unit, tables.filter)
            | may_join(right, following, tables.filter)
            | may_join(unit, following, tables.filter)
        )
        if (merges == 0) & (np.uint64(out[number - 1]) == left >> _SHIFT):
            out[number - 1] = token
            done = place + 1
            joining[joined] = place
            joined += 1
            continue
        first, after = place - 1, place + 1
        while (_plain(units, first - 1) ^ left) & _KIND == 0:
            first -= 1
        while (_plain(units, after) ^ left) & _KIND == 0:
            after += 1
        if after - first > PIECE_LIMIT:
            return 0
        number -= place - first
        while joined > 0 and joining[joined - 1] > first:  # these have made one token of two
            joined -= 1
            number += 1
        _copy(units, first, after, out, number)
        number += merge(out, number, after - first, room, tables.joins, tables.merged)
        done = after
    return _copy(units, done, count + 1, out, number) - written


@inlined
def _plain(units: Units, place: Any) -> Any:
    return np.uint64(units[np.uint64(place)]) & _PLAIN


@inlined
def _copy(units: Units, first: int, last: int, out: Out, number: int) -> Any:
    """The number of tokens after those of `units` from `first` to `last` are added to them."""
    # COPIED at once, however many there are: their number cannot be predicted. What is too much is written over.
    # Unsigned, since numba lets a negative index count from the end, which keeps LLVM from vectors.
    source, target = np.uint64(first), np.uint64(number)
    while source < np.uint64(last):
        for place in range(np.uint64(COPIED)):
            out[target + place] = units[source + place] >> np.uint32(UNIT_BITS)
        source += np.uint64(COPIED)
        target += np.uint64(COPIED)
    return number + last - first
