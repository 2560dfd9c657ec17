"""Byte-level byte-pair encoding of a text column: the pieces of GPT-2's pattern, each merged by rank.

What makes it fast:

- Pieces of ASCII are remembered: those of up to 23 bytes and three tokens in a table that is read without a branch that
  cannot be predicted, others in a second one. 98 % of the pieces of English and code are found in the first.
- A piece of other characters starts as characters, not as bytes: one table gives the kind and the token of a character.
  That is exact unless a token joins a part of one character to another character. Such tokens are rare (15 of 16,000 in
  a vocabulary trained on English, Chinese and code); where one of them may be, both characters start as bytes.
- Runs of characters without spaces, as in Chinese, are encoded many pieces at a time (`runs.py`).

A document with a piece of more than PIECE_LIMIT units is left to the caller, since merging by repeated search is
quadratic; so is one with a character that this Python's Unicode does not know.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..columns import Bytes, Offsets
from .compile import compiled, inlined
from .lanes import LANES, trailing_zeros, word_at
from .merges import (
    DOUBTFUL,
    FACTOR,
    NONE,
    TOKEN_BITS,
    UNKNOWN,
    Out,
    Room,
    Tables,
    Units,
    Words,
    encode_bytes,
    merge,
)
from .pattern import SPACE, ascii_piece, decode, mark_starts, marks_behind, may_contract, space_end
from .runs import COPIED, PIECE_LIMIT, encode_run

SPACE_LIMIT = 4 * PIECE_LIMIT
ROOM = SPACE_LIMIT + 8
"""Of what is noted about a piece: characters have four bytes at most."""
SPARE = COPIED + 2
"""Tokens that may be written behind the last one."""

SHORT_BITS = 16
SHORT_BYTES, SHORT_TOKENS = 15, 6
SHORT_WORDS = 8 << SHORT_BITS
"""Pairs of entries of four words, 4 MiB: the bytes of a piece with their number in two words, and its tokens of 20 bits
with theirs in two. A pair is a line of the processor's cache."""
LONG_BITS = 13
LONG_BYTES, LONG_TOKENS = 128, 32
LONG_ENTRY = 1 + LONG_BYTES // 8
"""Words of an entry, 1 MiB in all: how many bytes and tokens a piece has, and its bytes. Its tokens lie apart, in
another MiB."""

_TOKEN, _COUNT = np.uint64((1 << TOKEN_BITS) - 1), np.uint64(3 * TOKEN_BITS)


class Memory(NamedTuple):
    """What the kernel writes on the way."""

    short: Words
    """The pieces that were met, as SHORT_WORDS says; the one used last is the first of its pair."""
    long: Words
    """Those that do not fit there, as LONG_ENTRY says."""
    long_tokens: Units
    """LONG_TOKENS for each of them."""
    room: Room
    units: Units
    """Of a run, as `runs.py` says."""
    joining: Offsets
    """Which of them may merge with the one before."""
    starts: Words
    """A bit for each byte of the longest document and one more."""
    tail: Bytes


@compiled
def encode_column(
    data: Bytes, offsets: Offsets, tables: Tables, memory: Memory, end: int, out: Out, lengths: Offsets
) -> int:
    """Writes the tokens of every document to `out`, `end` behind each, and their numbers to `lengths`: 0 for a document
    that is left to the caller. Returns how many were written; `out` has room for a token a byte, one a document and
    SPARE more."""
    written = 0
    for document in range(len(offsets) - 1):
        count = _encode_document(data, offsets[document], offsets[document + 1], tables, memory, out, written)
        lengths[document] = count
        if count:
            written += count
            out[written - 1] = end
    return written


@inlined
def _encode_document(data: Bytes, begin: int, stop: int, tables: Tables, memory: Memory, out: Out, start: int) -> Any:
    """How many tokens a document has with its end, which is not written; 0 when it is left to the caller."""
    starts = memory.starts
    position, written = begin, start
    block, bits = np.int64(0), np.uint64(0)
    marks, at_marks = False, False
    while position < stop:
        count = 0
        if data[position] >= 0x80:
            units, joining, room = memory.units, memory.joining, memory.room
            after, count = encode_run(data, position, stop, tables, units, joining, room, out, written)
            at_marks = False
        else:
            if not marks:
                mark_starts(data, begin, stop, starts, memory.tail)
                marks = True
            if not at_marks:
                block, bits = marks_behind(starts, position - begin)
            position, written, block, bits = _copy_known(data, begin, stop, position, block, bits, memory, out, written)
            while bits == 0:
                block += 1
                bits = starts[block]
            marked = begin + block * LANES + trailing_zeros(bits)
            bits &= bits - np.uint64(1)
            after, ascii_only = ascii_piece(data, position, marked, stop, tables.characters)
            if ascii_only:
                count = _encode_ascii(data, position, after, tables, memory, out, written)
            at_marks = ascii_only and after == marked
        if count == 0:
            after, count = _encode_piece(data, position, stop, tables, memory.room, out, written)
            at_marks = False
        if count == 0:
            return 0
        position = after
        written += count
    return written - start + 1


@inlined
def _copy_known(
    data: Bytes, begin: int, stop: int, position: int, block: Any, bits: Any, memory: Memory, out: Out, written: int
) -> tuple[Any, Any, Any, Any]:
    """Writes the tokens of short pieces that were met before, from `position` to the first piece that is something else
    or the last of the document: (its place, tokens written, block and marks there).

    What the other loop does as well: by itself, this one stays in the registers of the processor.
    """
    starts, short = memory.starts, memory.short
    last = min(stop, len(data) - SHORT_BYTES) - 1
    while position < last:
        while bits == 0:
            block += 1
            bits = starts[block]
        marked = begin + block * LANES + trailing_zeros(bits)
        length = marked - position
        if length > SHORT_BYTES or marked > last or data[marked] >= 0x80 or may_contract(data, position, length):
            break
        low, high = _key(data, position, length)
        slot = _slot(low, high)
        if (short[slot] ^ low | short[slot + 1] ^ high) != 0:
            slot += 4
            if (short[slot] ^ low | short[slot + 1] ^ high) != 0:
                break
        written += _copy_short(short, slot, out, written)
        bits &= bits - np.uint64(1)
        position = marked
    return position, written, block, bits


@inlined
def _encode_ascii(data: Bytes, begin: int, after: int, tables: Tables, memory: Memory, out: Out, written: int) -> Any:
    """How many tokens the ASCII piece from `begin` to `after` has, which are written; 0 when it is too long."""
    length = after - begin
    if length > SHORT_BYTES or begin + SHORT_BYTES >= len(data):
        return _encode_long(data, begin, after, tables, memory, out, written)
    short = memory.short
    low, high = _key(data, begin, length)
    slot = _slot(low, high)
    for place in (slot, slot + 4):
        if short[place] == low and short[place + 1] == high:
            return _copy_short(short, place, out, written)
    count: Any = np.int64(encode_bytes(data, begin, after, tables, memory.room, out, written))
    if count <= SHORT_TOKENS:
        for place in range(slot, slot + 4):
            short[place + 4] = short[place]
        short[slot], short[slot + 1] = low, high
        short[slot + 2] = _packed(out, written, min(count, 3)) | np.uint64(count) << _COUNT
        short[slot + 3] = _packed(out, written + 3, count - 3)
    return count


@compiled
def _encode_long(data: Bytes, begin: int, after: int, tables: Tables, memory: Memory, out: Out, written: int) -> Any:
    """The same for a piece that the table of short ones does not hold."""
    length = after - begin
    if length > PIECE_LIMIT:
        return 0
    if length > LONG_BYTES or begin + LONG_BYTES > len(data):
        return encode_bytes(data, begin, after, tables, memory.room, out, written)
    words = (length + 7) // 8
    mixed = np.uint64(length)
    for place in range(words):
        mixed = (mixed ^ _word(data, begin, length, place)) * FACTOR
        mixed ^= mixed >> np.uint64(32)
    slot = np.int64(mixed * FACTOR >> np.uint64(64 - LONG_BITS))
    entry, tokens = slot * LONG_ENTRY, slot * LONG_TOKENS
    differs = memory.long[entry] >> np.uint64(8) ^ np.uint64(length)
    for place in range(words):
        differs |= memory.long[entry + 1 + place] ^ _word(data, begin, length, place)
    if differs == 0:
        count: Any = np.int64(memory.long[entry] & np.uint64(0xFF))
        for place in range(count):
            out[written + place] = memory.long_tokens[tokens + place]
        return count
    count = np.int64(encode_bytes(data, begin, after, tables, memory.room, out, written))
    if count <= LONG_TOKENS and (length > SHORT_BYTES or count > SHORT_TOKENS):
        memory.long[entry] = np.uint64(length << 8 | count)
        for place in range(words):
            memory.long[entry + 1 + place] = _word(data, begin, length, place)
        for place in range(count):
            memory.long_tokens[tokens + place] = out[written + place]
    return count


@compiled
def _encode_piece(
    data: Bytes, begin: int, stop: int, tables: Tables, room: Room, out: Out, written: int
) -> tuple[int, int]:
    """(end, number of tokens, which are written) of the piece that starts at `begin`; 0 tokens: left to the caller.

    It starts as characters, those on both sides of a doubtful border as bytes. All others are whole before they merge
    with another, since a merge has a higher rank than those that make its parts.
    """
    characters, parts = tables.characters, tables.parts
    place = begin
    count = 0
    if data[place] == 32:
        out[written] = tables.single[32]
        count = 1
        place += 1
    code, size = decode(data, place)
    entry = np.int64(characters[code])
    kind = entry & 3
    if kind == SPACE:
        after = space_end(data, begin, stop, characters)
        if after - begin > SPACE_LIMIT:
            return after, 0
        return after, encode_bytes(data, begin, after, tables, room, out, written)
    first, before = 0, begin
    while True:
        if entry & UNKNOWN:
            return place, 0
        value, more = entry >> 6, entry >> 2 & 3
        if entry & DOUBTFUL and place > begin and _is_border(data, place, tables):
            count = _write_bytes(data, before, place, tables, out, written, first)
            first, count = count, _write_bytes(data, place, place + size, tables, out, written, count)
        else:
            first = count
            out[written + count] = np.int64(parts[4 * value]) if more else value
            count += 1
            for part in range(1, more + 1):
                out[written + count] = parts[4 * value + part]
                count += 1
        before = place
        place += size
        if place == stop or count > PIECE_LIMIT:
            break
        code, size = decode(data, place)
        entry = np.int64(characters[code])
        if entry & 3 != kind:
            break
    if count > PIECE_LIMIT:
        return place, 0
    return place, merge(out, written, count, room, tables.pairs, tables.merged)


@inlined
def _write_bytes(data: Bytes, begin: int, after: int, tables: Tables, out: Out, written: int, count: int) -> Any:
    """The number of tokens of a piece after those of single bytes are added to `count`."""
    for place in range(after - begin):
        out[written + count + place] = tables.single[data[begin + place]]
    return count + after - begin


@inlined
def _is_border(data: Bytes, place: int, tables: Tables) -> Any:
    """Whether a token may join parts of the characters before and behind `place`."""
    return tables.borders[data[place]] >> np.uint64(data[place - 1] & 63) & np.uint64(1) != 0


@inlined
def _copy_short(short: Words, place: int, out: Out, written: int) -> Any:
    """How many tokens the entry at `place` has, which are written."""
    packed = short[place + 2]
    count = np.int64(packed >> _COUNT)
    # Always three: how many there are cannot be predicted. What is too much is written over.
    _unpack(packed, out, written)
    if count > 3:
        _unpack(short[place + 3], out, written + 3)
    return count


@inlined
def _unpack(packed: Any, out: Out, written: int) -> None:
    out[written] = packed & _TOKEN
    out[written + 1] = packed >> np.uint64(TOKEN_BITS) & _TOKEN
    out[written + 2] = packed >> np.uint64(2 * TOKEN_BITS) & _TOKEN


@inlined
def _packed(out: Out, written: int, count: Any) -> Any:
    """Up to three tokens as one word."""
    packed = np.uint64(0)
    for place in range(count):
        packed |= np.uint64(out[written + place]) << np.uint64(TOKEN_BITS * place)
    return packed


@inlined
def _key(data: Bytes, begin: int, length: int) -> tuple[Any, Any]:
    """The bytes of a short piece as two words, their number in the highest byte of the second."""
    low, high, number = word_at(data, begin), word_at(data, begin + 8), np.uint64(length) << np.uint64(56)
    if length <= 8:
        return low & NONE >> np.uint64(64 - 8 * length), number
    return low, high & NONE >> np.uint64(128 - 8 * length) | number


@inlined
def _slot(low: Any, high: Any) -> Any:
    """Where a short piece lies."""
    return np.int64((low ^ high * FACTOR) * FACTOR >> np.uint64(64 - SHORT_BITS)) * 8


@inlined
def _word(data: Bytes, begin: int, length: int, place: int) -> Any:
    """Eight of the bytes of a piece, zeros behind its end."""
    left = length - 8 * place
    word = word_at(data, begin + 8 * place)
    return word & NONE >> np.uint64(64 - 8 * left) if left < 8 else word
