"""GPT-2's pattern: where the pieces of a text start.

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

(Radford et al. 2019; the pattern of `ByteLevel` in Hugging Face tokenizers.) Where a piece of ASCII starts depends on a
byte and its neighbours alone, so that it is marked for 64 bytes at a time, by a few operations on words of one bit a
byte (after Langdale and Lemire, "Parsing gigabytes of JSON per second", 2019). Pieces with other characters, and the
contractions, are then looked at one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..columns import Bytes, Offsets
from .compile import compiled, inlined
from .lanes import LANES, bytes_between, trailing_zeros

Words = npt.NDArray[np.uint64]
Units = npt.NDArray[np.uint32]

OTHER, LETTER, NUMBER, SPACE = 0, 1, 2, 3
"""Kinds of characters."""

_BLANK, _APOSTROPHE = 32, 39
_CONTRACTING = sum(1 << (letter & 31) for letter in b"stmdrvl")
_ONE, _TOP, _ALL = np.uint64(1), np.uint64(LANES - 1), np.uint64(0xFFFFFFFFFFFFFFFF)


@compiled
def find_pieces(data: Bytes, offsets: Offsets, characters: Units, starts: Words, tail: Bytes, ends: Offsets) -> int:
    """Writes where each piece of each document ends; how many there are. `characters` holds the kind of each code point
    in its lowest bits; `starts` and `tail` are those of `mark_starts`."""
    found = 0
    for document in range(len(offsets) - 1):
        begin, stop = offsets[document], offsets[document + 1]
        mark_starts(data, begin, stop, starts, tail)
        position = begin
        block, bits = marks_behind(starts, 0)
        while position < stop:
            while bits == 0:
                block += 1
                bits = starts[block]
            marked = begin + block * LANES + trailing_zeros(bits)
            bits &= bits - _ONE
            after, ascii_only = ascii_piece(data, position, marked, stop, characters)
            if not ascii_only:
                after = _piece_end(data, position, stop, characters)
            if after != marked:
                block, bits = marks_behind(starts, after - begin)
            position = after
            ends[found] = position
            found += 1
    return found


@inlined
def mark_starts(data: Bytes, begin: int, stop: int, starts: Words, tail: Bytes) -> None:
    """Marks where pieces start in the document from `begin` to `stop`, a bit a byte, and its end.

    Bytes that are not ASCII are taken for a kind of their own, and contractions for nothing special: `ascii_piece`
    corrects both. `tail` has room for LANES bytes.
    """
    blocks = (stop - begin) // LANES + 1
    letter_before = number_before = space_before = high_before = other_before = blank_before = np.uint64(0)
    following = _kinds(data, begin, tail)
    for block in range(blocks):
        letter, number, space, high, blank = following
        left = stop - begin - block * LANES
        if left <= LANES:
            # Behind the end all is white space, so that white space at the end goes on and is not parted.
            following = np.uint64(0), np.uint64(0), _ALL, np.uint64(0), np.uint64(0)
        else:
            following = _kinds(data, begin + (block + 1) * LANES, tail)
        outside = _ALL << np.uint64(left) if left < LANES else np.uint64(0)
        space |= outside
        other = ~(letter | number | space | high)
        # The kind changes, and no blank before joins the piece.
        marks = letter & ~(letter << _ONE | letter_before)
        marks |= number & ~(number << _ONE | number_before)
        marks |= other & ~(other << _ONE | other_before)
        marks &= ~(blank << _ONE | blank_before)
        marks |= high & ~(high << _ONE | high_before)
        # White space is a piece without its last character, which is another or joins the next. What follows it may be
        # other white space where it is not ASCII.
        marks |= space & ~(space << _ONE | space_before)
        marks |= space & ~((space | high) >> _ONE | (following[2] | following[3]) << _TOP)
        starts[block] = marks & ~outside | (_ONE << np.uint64(left) if left < LANES else np.uint64(0))
        letter_before, number_before, space_before = letter >> _TOP, number >> _TOP, space >> _TOP
        high_before, other_before, blank_before = high >> _TOP, other >> _TOP, blank >> _TOP


@inlined
def marks_behind(starts: Words, place: int) -> tuple[Any, Any]:
    """(block, the marks in it) behind a place of the document, which is counted from its begin."""
    block = np.int64(place) // LANES
    return block, starts[block] & ~_ONE << np.uint64(place % LANES)


@inlined
def ascii_piece(data: Bytes, begin: int, marked: int, stop: int, characters: Units) -> tuple[int, bool]:
    """(end, True) of the piece that starts at `begin` if it is all ASCII, (anything, False) of another; `marked` is the
    next start that `mark_starts` found."""
    first = data[begin]
    if first >= 0x80:
        return marked, False
    if first == _APOSTROPHE:
        size = _contraction(data, begin, stop)
        if size:
            return begin + size, True
    if marked == stop or data[marked] < 0x80:
        return marked, True
    kind = characters[data[marked - 1]] & 3
    code, _ = decode(data, marked)
    if characters[code] & 3 == kind or (first == _BLANK and marked == begin + 1):
        return marked, False
    return marked - (kind == SPACE and marked > begin + 1), True


@inlined
def may_contract(data: Bytes, begin: int, length: int) -> Any:
    """Whether a contraction may start at `begin`, where `mark_starts` sees a piece of `length` bytes that is not the
    last one."""
    return (data[begin] == _APOSTROPHE) & (length == 1) & (_CONTRACTING >> (data[begin + 1] & 31) & 1 != 0)


@inlined
def _kinds(data: Bytes, place: int, tail: Bytes) -> tuple[Any, Any, Any, Any, Any]:
    """(letters, numbers, white space, not ASCII, blanks) among the 64 bytes from `place` on, a bit each; bytes behind
    the end of `data` are something."""
    if place + LANES <= len(data):
        return _kinds_of(data, place)
    for offset in range(len(data) - place):
        tail[offset] = data[place + offset]
    return _kinds_of(tail, 0)


@inlined
def _kinds_of(data: Bytes, place: int) -> tuple[Any, Any, Any, Any, Any]:
    blank = bytes_between(data, place, 0, 32, 1)
    return (
        bytes_between(data, place, 0x20, 0x61, 26),
        bytes_between(data, place, 0, 0x30, 10),
        bytes_between(data, place, 0, 9, 5) | blank,
        bytes_between(data, place, 0, 0x80, 128),
        blank,
    )


@inlined
def _piece_end(data: Bytes, begin: int, stop: int, characters: Units) -> Any:
    """Where the piece that starts at `begin` ends, if it is none of the contractions."""
    place = begin + (data[begin] == _BLANK)
    code, size = decode(data, place)
    kind = characters[code] & 3
    if kind == SPACE:
        return space_end(data, begin, stop, characters)
    while characters[code] & 3 == kind:
        place += size
        if place == stop:
            break
        code, size = decode(data, place)
    return place


@inlined
def space_end(data: Bytes, begin: int, stop: int, characters: Units) -> Any:
    """Where a piece of white space ends: before the last character of the run, if it has more and other text
    follows."""
    last = place = begin
    while place < stop:
        code, size = decode(data, place)
        if characters[code] & 3 != SPACE:
            break
        last = place
        place += size
    return place if place == stop or last == begin else last


@inlined
def decode(data: Bytes, place: int) -> tuple[Any, int]:
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
