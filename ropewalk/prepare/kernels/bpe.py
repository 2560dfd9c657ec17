"""Byte-level byte-pair encoding of a text column: the pieces of GPT-2's pattern, each merged by rank.

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

One pass finds the pieces (Radford et al. 2019; the pattern of `ByteLevel` in Hugging Face tokenizers) and encodes each
before it goes on. What makes it fast:

- A piece starts as characters, not as bytes: one table gives the kind and the token of a character. That is exact
  unless a token joins a part of one character to another character. Such tokens are rare (15 of 16,000 in a vocabulary
  trained on English, Chinese and code); where a piece may hold one of them, it starts as bytes.
- Pairs are looked up behind a bit filter, since most neighbours are no pair that merges.
- A run of other characters than ASCII is first written down character by character, with next to no branches, and what
  may merge is marked. In Chinese few pairs are, and most of those merge by themselves.
- Short pieces of ASCII are remembered. Pieces of other scripts are not: in Chinese they hardly ever come back.

A document with a piece of more than PIECE_LIMIT units is left to the caller, since merging by repeated search is
quadratic; so is one with a character that this Python's Unicode does not know.

"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..columns import Bytes, Offsets
from .compile import compiled, inlined

Words = npt.NDArray[np.uint64]
Units = npt.NDArray[np.uint32]
Out = npt.NDArray[Any]

OTHER, LETTER, NUMBER, SPACE = 0, 1, 2, 3
"""Kinds of characters."""
DOUBTFUL, UNKNOWN = 16, 32
"""Flags of characters: a token may join a part of the character before to this one or to a part of it; the kind is not
known, so that a document with this character is left to the caller."""

PIECE_LIMIT = 256
RUN_LIMIT = 4 * PIECE_LIMIT
ROOM = RUN_LIMIT + 8
"""Of what is noted about a run or a piece: characters have four bytes at most."""
FILTER_BITS = 20
"""128 KiB: with 16,000 merges 1.5 % of the pairs that do not merge pass, with 50,000 5 %."""
TOKEN_BITS = 20
"""Of a token's id."""
CACHE_BITS = 16
CACHE_WORDS = 4 << CACHE_BITS
"""Four words an entry: the bytes of a piece, at most 23, with their number, and up to three tokens of 20 bits."""
KEY_BYTES = 24

MERGES, STARTS = 1, 2
"""Marks of the units of a run: it may merge with the one before; it starts a piece."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)


class Tables(NamedTuple):
    """A vocabulary as the kernel reads it."""

    characters: Units
    """By code point: value << 6 | UNKNOWN | DOUBTFUL | (tokens - 1) << 2 | kind. The value is the character's token, or
    the code point where it takes several."""
    parts: Units
    """The tokens of each character, four places a code point."""
    single: Units
    """The token of each byte."""
    pairs: Words
    """Merges by open addressing, the size a power of two: left << 44 | right << 24 | rank; all ones where empty."""
    merged: Units
    """The token of each merge, by rank."""
    filter: Words
    """One bit for the hash of each merge."""
    borders: npt.NDArray[np.uint8]
    """By last byte << 8 | first byte of two characters: whether a token may join a part of one to the other."""


class Memory(NamedTuple):
    """What the kernel writes on the way."""

    cache: Words
    ranks: Words
    units: Units
    marks: npt.NDArray[np.uint8]


@compiled
def encode_column(
    data: Bytes, words: Words, offsets: Offsets, tables: Tables, memory: Memory, end: int, out: Out, lengths: Offsets
) -> int:
    """Writes the tokens of every document to `out`, `end` behind each, and their numbers to `lengths`: 0 for a document
    that is left to the caller. Returns how many were written; `out` has room for a token a byte and one a document.

    `words` is `data` seen as words of eight bytes that begin at every byte.
    """
    written = 0
    for document in range(len(offsets) - 1):
        first = written
        position, stop = offsets[document], offsets[document + 1]
        while position < stop:
            count = 0
            if data[position] >= 0x80:
                after, count = _encode_run(data, position, stop, tables, memory, out, written)
            else:
                after, ascii_only = _ascii_piece(data, position, stop, tables.characters)
                if ascii_only:
                    count = _encode_ascii(data, words, position, after, tables, memory, out, written)
            if count == 0:
                after, count = _encode_piece(data, position, stop, tables, memory.ranks, out, written)
            if count == 0:
                written = first
                break
            position = after
            written += count
        if position == stop:
            out[written] = end
            written += 1
        lengths[document] = written - first
    return written


@compiled
def find_pieces(data: Bytes, offsets: Offsets, characters: Units, ends: Offsets) -> int:
    """Writes where each piece of each document ends; how many there are. `characters` needs kinds alone."""
    found = 0
    for document in range(len(offsets) - 1):
        position, stop = offsets[document], offsets[document + 1]
        while position < stop:
            position = _piece_end(data, position, stop, characters)
            ends[found] = position
            found += 1
    return found


@compiled
def fill_merges(left: Units, right: Units, merged: Units, tables: Tables) -> bool:
    """Enters the merges in order of rank into `pairs`, `merged` and `filter`; False when a pair stands there twice."""
    mask = len(tables.pairs) - 1
    for rank in range(len(left)):
        key = np.uint64(left[rank]) << np.uint64(20) | np.uint64(right[rank])
        mixed = key * _FACTOR
        bit = mixed >> np.uint64(64 - FILTER_BITS)
        tables.filter[np.int64(bit >> np.uint64(6))] |= np.uint64(1) << (bit & np.uint64(63))
        slot = np.int64(mixed >> np.uint64(24)) & mask
        while tables.pairs[slot] != _NONE:
            if tables.pairs[slot] >> np.uint64(24) == key:
                return False
            slot = (slot + 1) & mask
        tables.pairs[slot] = key << np.uint64(24) | np.uint64(rank)
        tables.merged[rank] = merged[rank]
    return True


@compiled
def fill_characters(kinds: npt.NDArray[np.uint8], tables: Tables, data: Bytes, ranks: Words) -> None:
    """Enters every code point into `characters` and `parts`, encoded by itself; merges are there already.

    `data` has room for a character.
    """
    for code in range(len(kinds)):
        size = _encode_utf8(code, data)
        if size:
            for place in range(size):
                tables.parts[4 * code + place] = tables.single[data[place]]
            count = _merge(tables.parts, 4 * code, size, ranks, tables)
            value = np.int64(tables.parts[4 * code]) if count == 1 else code
            tables.characters[code] = value << 6 | (count - 1) << 2 | kinds[code]


@inlined
def _ascii_piece(data: Bytes, begin: int, stop: int, characters: Units) -> tuple[int, bool]:
    """(end, True) of the piece that starts at `begin` if it is all ASCII, (anything, False) of another."""
    place = begin
    byte = data[place]
    if byte == 32 and place + 1 < stop:
        place += 1
        byte = data[place]
    if byte >= 0x80:
        return begin, False
    kind = characters[byte] & 3
    if kind == SPACE:
        return _space_end(data, begin, stop, characters)
    if byte == 39 and place == begin:
        size = _contraction(data, begin, stop)
        if size:
            return begin + size, True
    place += 1
    while place < stop:
        byte = data[place]
        if byte >= 0x80:
            code, _ = _decode(data, place)
            return place, characters[code] & 3 != kind
        if characters[byte] & 3 != kind:
            break
        place += 1
    return place, True


@inlined
def _piece_end(data: Bytes, begin: int, stop: int, characters: Units) -> Any:
    """Where the piece that starts at `begin` ends."""
    place, ascii_only = _ascii_piece(data, begin, stop, characters)
    if ascii_only:
        return place
    place = begin + (data[begin] == 32)
    code, size = _decode(data, place)
    kind = characters[code] & 3
    if kind == SPACE:
        return _space_end(data, begin, stop, characters)[0]
    while characters[code] & 3 == kind:
        place += size
        if place == stop:
            break
        code, size = _decode(data, place)
    return place


@inlined
def _encode_ascii(
    data: Bytes, words: Words, begin: int, after: int, tables: Tables, memory: Memory, out: Out, written: int
) -> Any:
    """How many tokens the ASCII piece from `begin` to `after` has, which are written; 0 when it is too long."""
    length = after - begin
    if length == 1:
        out[written] = tables.single[data[begin]]
        return 1
    if length > PIECE_LIMIT:
        return 0
    cache = memory.cache
    remembered = length < KEY_BYTES and begin + KEY_BYTES <= len(data)
    slot: Any = 0
    key0, key1, key2 = _NONE, _NONE, _NONE
    if remembered:
        key0, key1, key2 = _key(words, begin, length)
        slot = np.int64((key0 ^ (key1 ^ key2 * _FACTOR) * _FACTOR) * _FACTOR >> np.uint64(64 - CACHE_BITS)) * 4
        if cache[slot] == key0 and cache[slot + 1] == key1 and cache[slot + 2] == key2:
            packed = cache[slot + 3]
            count: Any = np.int64(packed >> np.uint64(60))
            out[written] = packed & np.uint64(0xFFFFF)
            if count > 1:
                out[written + 1] = packed >> np.uint64(20) & np.uint64(0xFFFFF)
            if count > 2:
                out[written + 2] = packed >> np.uint64(40) & np.uint64(0xFFFFF)
            return count
    count = _encode_bytes(data, begin, after, tables, memory.ranks, out, written)
    if remembered and count <= 3:
        packed = np.uint64(count) << np.uint64(60)
        for place in range(count):
            packed |= np.uint64(out[written + place]) << np.uint64(20 * place)
        cache[slot], cache[slot + 1], cache[slot + 2], cache[slot + 3] = key0, key1, key2, packed
    return count


@inlined
def _encode_run(
    data: Bytes, begin: int, stop: int, tables: Tables, memory: Memory, out: Out, written: int
) -> tuple[int, int]:
    """(end, number of tokens, which are written) of the whole pieces from `begin` on that have no ASCII, no white space
    and no doubtful border; 0 tokens when the first piece is none of these."""
    characters, parts, units, marks = tables.characters, tables.parts, memory.units, memory.marks
    place, count = begin, 0
    piece_place, piece_count = begin, 0
    kind, last = np.int64(-1), np.int64(0)
    whole = False
    while count < RUN_LIMIT:
        if place == stop:
            whole = True
            break
        if data[place] < 0x80:
            whole = characters[data[place]] & 3 != kind
            break
        code, size = _decode(data, place)
        entry = np.int64(characters[code])
        starts = entry & 3 != kind
        unusual = UNKNOWN if starts else UNKNOWN | DOUBTFUL
        if entry & 3 == SPACE or (entry & unusual and (entry & UNKNOWN or _is_border(data, place, tables))):
            whole = starts
            break
        kind = entry & 3
        value, more = entry >> 6, entry >> 2 & 3
        unit = np.int64(parts[4 * value]) if more else value
        piece_place, piece_count = (place, count) if starts else (piece_place, piece_count)
        # Looked up whether it is needed or not: where a piece starts cannot be predicted, and a wrong guess costs more.
        merges = _may_merge(last, unit, tables)
        marks[count] = STARTS if starts else merges
        units[count] = unit
        count += 1
        for part in range(1, more + 1):
            # The tokens of a character do not merge with each other: it was encoded by itself.
            marks[count] = 0
            unit = np.int64(parts[4 * value + part])
            units[count] = unit
            count += 1
        last = unit
        place += size
    if not whole:
        place, count = piece_place, piece_count
    return place, _merge_run(count, memory, tables, out, written)


@inlined
def _merge_run(count: int, memory: Memory, tables: Tables, out: Out, written: int) -> int:
    """Writes the units of a run, merged; how many tokens they are, 0 when a piece is too long.

    A pair merges at once where neither it nor what it becomes can merge with a neighbour: no order of merges matters
    then. Otherwise its whole piece is merged by rank.
    """
    units, marks = memory.units, memory.marks
    place = first = 0
    number = first_number = written
    while place < count:
        if marks[place] & STARTS:
            first, first_number = place, number
        merged = _NONE
        if marks[place] & MERGES:
            merged = _pair(np.int64(units[place - 1]), np.int64(units[place]), tables)
        if merged == _NONE:
            out[number] = units[place]
            number += 1
            place += 1
            continue
        token = np.int64(tables.merged[np.int64(merged)])
        follows = place + 1 < count and marks[place + 1] & STARTS == 0
        free = np.int64(out[number - 1]) == np.int64(units[place - 1])
        free &= not (follows and (marks[place + 1] & MERGES or _may_merge(token, np.int64(units[place + 1]), tables)))
        free &= not (place - 1 > first and _may_merge(np.int64(out[number - 2]), token, tables))
        if free:
            out[number - 1] = token
            place += 1
            continue
        number = first_number
        place = first
        while place < count and (place == first or marks[place] & STARTS == 0):
            out[number + place - first] = units[place]
            place += 1
        if place - first > PIECE_LIMIT:
            return 0
        number += _merge(out, number, place - first, memory.ranks, tables)
    return number - written


@inlined
def _encode_piece(
    data: Bytes, begin: int, stop: int, tables: Tables, ranks: Words, out: Out, written: int
) -> tuple[int, int]:
    """(end, number of tokens, which are written) of the piece that starts at `begin`; 0 tokens: left to the caller."""
    characters, parts = tables.characters, tables.parts
    place = begin
    count = 0
    last = np.int64(0)
    if data[place] == 32:
        last = np.int64(tables.single[32])
        out[written] = last
        count = 1
        place += 1
    code, size = _decode(data, place)
    entry = np.int64(characters[code])
    kind = entry & 3
    if kind == SPACE:
        after, _ = _space_end(data, begin, stop, characters)
        return after, _encode_bytes(data, begin, after, tables, ranks, out, written)
    best = _NONE
    doubt = False
    while True:
        if entry & UNKNOWN:
            return place, 0
        if entry & DOUBTFUL and place > begin:
            doubt |= _is_border(data, place, tables)
        value, more = entry >> 6, entry >> 2 & 3
        unit = np.int64(parts[4 * value]) if more else value
        if count:
            rank = _pair(last, unit, tables)
            ranks[count - 1] = rank
            best = min(best, rank)
        out[written + count] = unit
        count += 1
        for part in range(1, more + 1):
            # The tokens of a character do not merge with each other: it was encoded by itself.
            ranks[count - 1] = _NONE
            unit = np.int64(parts[4 * value + part])
            out[written + count] = unit
            count += 1
        last = unit
        place += size
        if place == stop or count > PIECE_LIMIT:
            break
        code, size = _decode(data, place)
        entry = np.int64(characters[code])
        if entry & 3 != kind:
            break
    if count > PIECE_LIMIT:
        return place, 0
    if doubt:
        return place, _encode_bytes(data, begin, place, tables, ranks, out, written)
    return place, count if best == _NONE else _merge_ranked(out, written, count, ranks, tables)


@compiled
def _encode_bytes(data: Bytes, begin: int, after: int, tables: Tables, ranks: Words, out: Out, written: int) -> int:
    """How many tokens the bytes from `begin` to `after` have, which are written; 0 when they are too many."""
    if after - begin > 4 * PIECE_LIMIT:
        return 0
    for place in range(after - begin):
        out[written + place] = tables.single[data[begin + place]]
    return _merge(out, written, after - begin, ranks, tables)


@compiled
def _merge(units: Out, start: int, count: int, ranks: Words, tables: Tables) -> int:
    """Merges `count` units from `start` on in place; how many remain."""
    best = _NONE
    for place in range(count - 1):
        rank = _pair(np.int64(units[start + place]), np.int64(units[start + place + 1]), tables)
        ranks[place] = rank
        best = min(best, rank)
    return count if best == _NONE else _merge_ranked(units, start, count, ranks, tables)


@compiled
def _merge_ranked(units: Out, start: int, count: int, ranks: Words, tables: Tables) -> int:
    """Merges the pair of lowest rank, the leftmost of equals, until none is left; `ranks` holds those of all pairs."""
    while count > 1:
        best, at = _NONE, 0
        for place in range(count - 1):
            if ranks[place] < best:
                best, at = ranks[place], place
        if best == _NONE:
            break
        units[start + at] = tables.merged[np.int64(best)]
        count -= 1
        for place in range(at + 1, count):
            units[start + place] = units[start + place + 1]
        for place in range(at, count - 1):
            ranks[place] = ranks[place + 1]
        merged = np.int64(units[start + at])
        if at > 0:
            ranks[at - 1] = _pair(np.int64(units[start + at - 1]), merged, tables)
        if at < count - 1:
            ranks[at] = _pair(merged, np.int64(units[start + at + 1]), tables)
    return count


@inlined
def _is_border(data: Bytes, place: int, tables: Tables) -> Any:
    """Whether a token may join parts of the characters before and behind `place`."""
    return tables.borders[np.int64(data[place - 1]) << 8 | np.int64(data[place])] != 0


@inlined
def _may_merge(left: np.int64, right: np.int64, tables: Tables) -> Any:
    """MERGES when the filter lets a pair pass, else 0."""
    bit = np.uint64(left << 20 | right) * _FACTOR >> np.uint64(64 - FILTER_BITS)
    return tables.filter[np.int64(bit >> np.uint64(6))] >> (bit & np.uint64(63)) & np.uint64(MERGES)


@inlined
def _pair(left: np.int64, right: np.int64, tables: Tables) -> Any:
    """The rank of a merge, _NONE for a pair that does not merge."""
    key = np.uint64(left << 20 | right)
    mixed = key * _FACTOR
    bit = mixed >> np.uint64(64 - FILTER_BITS)
    if tables.filter[np.int64(bit >> np.uint64(6))] >> (bit & np.uint64(63)) & np.uint64(1) == 0:
        return _NONE
    mask = len(tables.pairs) - 1
    slot = np.int64(mixed >> np.uint64(24)) & mask
    while tables.pairs[slot] >> np.uint64(24) != key:
        if tables.pairs[slot] == _NONE:
            return _NONE
        slot = (slot + 1) & mask
    return tables.pairs[slot] & np.uint64(0xFFFFFF)


@inlined
def _key(words: Words, begin: int, length: int) -> tuple[Any, Any, Any]:
    """The bytes of a piece as three words, their number in the highest byte of the last."""
    low, number = words[begin], np.uint64(length) << np.uint64(56)
    if length <= 8:
        return low & _NONE >> np.uint64(64 - 8 * length), np.uint64(0), number
    middle = words[begin + 8]
    if length <= 16:
        return low, middle & _NONE >> np.uint64(128 - 8 * length), number
    return low, middle, words[begin + 16] & _NONE >> np.uint64(192 - 8 * length) | number


@inlined
def _decode(data: Bytes, place: int) -> tuple[Any, int]:
    """(code point, bytes) of the character at `place`; the text is valid UTF-8."""
    byte = np.int64(data[place])
    if byte < 0x80:
        return byte, 1
    second = np.int64(data[place + 1]) & 0x3F
    if byte < 0xE0:
        return (byte & 0x1F) << 6 | second, 2
    third = np.int64(data[place + 2]) & 0x3F
    if byte < 0xF0:
        return (byte & 0xF) << 12 | second << 6 | third, 3
    return (byte & 7) << 18 | second << 12 | third << 6 | np.int64(data[place + 3]) & 0x3F, 4


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


@inlined
def _space_end(data: Bytes, begin: int, stop: int, characters: Units) -> tuple[int, bool]:
    """(end, whether all is ASCII) of a piece of white space: without the last character of the run, if it has more and
    other text follows."""
    last = place = begin
    ascii_only = True
    while place < stop:
        code, size = _decode(data, place)
        if characters[code] & 3 != SPACE:
            break
        ascii_only &= size == 1
        last = place
        place += size
    return place if place == stop or last == begin else last, ascii_only


@compiled
def _contraction(data: Bytes, place: int, stop: int) -> int:
    """Bytes of 's 't 're 've 'm 'll 'd at `place`, where an apostrophe stands; 0 for something else."""
    if place + 1 >= stop:
        return 0
    letter = data[place + 1]
    if letter == 115 or letter == 116 or letter == 109 or letter == 100:
        return 2
    if place + 2 >= stop:
        return 0
    second = data[place + 2]
    return 3 if ((letter == 114 or letter == 118) and second == 101) or (letter == 108 and second == 108) else 0
