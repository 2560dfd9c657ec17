"""Text on the device -> hashes of its words, for all bytes at once: what `kernels/shingles.py` reads in one pass.

A word begins at a letter or digit before which none is open, and that hangs on the character before it alone (marks are
passed over). So all beginnings are found at once, eight bytes a lane; they are counted, listed in order, and then each
word is hashed by a lane of its own. The hashes are those of the CPU kernel, bit by bit.

Bytes are read as 64-bit numbers; there are PADDING more of them after the text, and they are zero. Only a stretch with
characters beyond ASCII looks at the table of Unicode: English never does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.words import FOLD, MARK, SHIFT, START, UNSEGMENTED

PADDING = 16
"""Zero bytes that follow the text, so that eight can be read at any place of it."""
LANES = 256
"""Lanes of a program that marks or lists words, of eight bytes each."""
WORDS = 64
"""Words that a program hashes: two a lane of one warp, so that a long word makes few others wait."""

_MARK, _START, _UNSEGMENTED = tl.constexpr(MARK), tl.constexpr(START), tl.constexpr(UNSEGMENTED)
_FOLD, _SHIFT = tl.constexpr(FOLD), tl.constexpr(SHIFT)
# The constants of kernels/shingles.py.
_WORD = tl.constexpr(0x9E3779B97F4A7C15)
_LENGTH = tl.constexpr(0xFF51AFD7ED558CCD)
_WIDE = tl.constexpr(1 << 63)
_HIGH = tl.constexpr(0x8080808080808080)
_LOW = tl.constexpr(0x7F7F7F7F7F7F7F7F)
_LOWER = tl.constexpr(0x2020202020202020)
_FROM_A, _PAST_Z = tl.constexpr(0x1F1F1F1F1F1F1F1F), tl.constexpr(0x0505050505050505)
_FROM_0, _PAST_9 = tl.constexpr(0x5050505050505050), tl.constexpr(0x4646464646464646)
_ALL = tl.constexpr(0xFFFFFFFFFFFFFFFF)
_ONES = tl.constexpr(0x0101010101010101)
_GATHER = tl.constexpr(0x0002040810204081)
"""Brings the lowest bits of eight bytes, in order, to bits 49 to 56 of the product."""


@triton.jit
def mark_words(data, begins, classes, marks, counts, size, LANES: tl.constexpr):
    """One bit a byte where a word begins, as `marks`, and the number of them in each program's part, as `counts`.

    `begins` has a bit where a document begins.
    """
    group = tl.program_id(0) * LANES + tl.arange(0, LANES)
    at = group * 8
    inside = at < size
    block = _block(data, at, inside)
    starts = tl.load(begins + group, mask=inside, other=0).to(tl.int32)
    before = tl.load(data + at - 1, mask=inside & (at > 0), other=0).to(tl.int32)
    wide = ((block & _HIGH) != 0) | (before >= 0x80)
    if tl.max(wide.to(tl.int32), axis=0) > 0:
        found = _marked_wide(data, begins, classes, at, starts, inside)
    else:
        _, letters = _ascii(block)
        packed = _packed(letters)
        opened = _alphanumeric(before).to(tl.int32)
        found = packed & (~(packed << 1 | opened) | starts) & 0xFF
    # What follows the last byte is zero, which is no letter.
    tl.store(marks + group, found.to(tl.uint8), mask=inside)
    tl.store(counts + tl.program_id(0), tl.sum(_bits(found), axis=0))


@triton.jit
def list_words(marks, sums, places, groups, LANES: tl.constexpr):
    """The place of every word, in order; `sums` has the words up to the end of each program's part."""
    program = tl.program_id(0)
    group = program * LANES + tl.arange(0, LANES)
    found = tl.load(marks + group, mask=group < groups, other=0).to(tl.int32)
    count = _bits(found)
    base = tl.load(sums + program - 1, mask=program > 0, other=0)
    index = base + tl.cumsum(count, axis=0) - count
    for byte in tl.static_range(8):
        bit = found >> byte & 1
        tl.store(places + index, group * 8 + byte, mask=bit != 0)
        index += bit


@triton.jit
def hash_words(data, begins, classes, folds, places, total, hashes, size, WORDS: tl.constexpr):
    """The hash of every word; `total` is their number, `size` that of the bytes."""
    words = tl.load(total)
    first = tl.program_id(0) * WORDS
    if first < words:
        index = first + tl.arange(0, WORDS)
        here = index < words
        at = tl.load(places + index, mask=here, other=0)
        # It ends before the next one begins; if it ends earlier, a character says so.
        stop = tl.load(places + index + 1, mask=index + 1 < words, other=size)
        word = tl.zeros([WORDS], tl.uint64)
        length = tl.zeros([WORDS], tl.uint64)
        reads = here
        while tl.max(reads.to(tl.int32), axis=0) > 0:
            block = _block_at(data, at, reads)
            part, letters = _ascii(block)
            gaps = (letters ^ _HIGH) & _HIGH
            # Ones below the first byte that is no letter; all of them when there is none.
            below = tl.where(gaps != 0, (gaps ^ (gaps - 1)) >> 8, _ALL)
            left = stop - at
            short = (tl.full([WORDS], 1, tl.uint64) << (tl.minimum(left, 7) * 8).to(tl.uint64)) - 1
            below = tl.where(left < 8, below & short, below)
            taken = ((below & _ONES) * _ONES >> 56).to(tl.int32)
            part &= below
            wide = reads & ((block & 0x80) != 0)
            after = (block >> (tl.minimum(taken, 7) * 8).to(tl.uint64) & 0x80) != 0
            more = reads & ((taken == 8) | ((taken > 0) & after)) & (taken < left)
            if tl.max(wide.to(tl.int32), axis=0) > 0:
                point, bytes_taken = _decoded(block)
                bits = tl.load(classes + point, mask=wide, other=0).to(tl.int32)
                begun = tl.load(begins + (at >> 3), mask=wide, other=0).to(tl.int32) >> (at & 7) & 1
                # A mark that a document begins with belongs to no word.
                goes_on = wide & tl.where((bits & _MARK) != 0, begun == 0, (bits & _START) != 0)
                folded = tl.load(folds + point, mask=goes_on & ((bits & _FOLD) != 0), other=0).to(tl.int32)
                lower = tl.where((bits & _FOLD) != 0, folded, point + (bits & _SHIFT))
                part = tl.where(wide, lower.to(tl.uint64) | _WIDE, part)
                length += tl.where(goes_on, 1, tl.where(wide, 0, taken)).to(tl.uint64)
                at += tl.where(wide, bytes_taken, taken)
                reads = reads & tl.where(wide, goes_on, taken > 0)
                more = tl.where(wide, goes_on & (at < stop), more)
            else:
                reads = reads & (taken > 0)
                length += tl.where(reads, taken, 0).to(tl.uint64)
                at += taken
            mixed = (word ^ part) * _WORD
            word = tl.where(reads, mixed ^ mixed >> 32, word)
            reads = more
        hashed = (word ^ length) * _LENGTH
        tl.store(hashes + index, (hashed ^ hashed >> 32).to(tl.int64, bitcast=True), mask=here)


@triton.jit
def _marked_wide(data, begins, classes, at, starts, inside):
    """As `mark_words`, of lanes that may meet any character: a word is open, or not, from byte to byte."""
    opened = _open_before(data, begins, classes, at, inside)
    found = tl.zeros_like(at)
    for byte in tl.static_range(8):
        here = tl.load(data + at + byte, mask=inside, other=0).to(tl.int32)
        opened = tl.where((starts >> byte & 1) != 0, 0, opened)
        leads = inside & (here >= 0xC0)
        block = _block_at(data, at + byte, leads)
        point, _ = _decoded(block)
        bits = tl.load(classes + tl.where(leads, point, 0), mask=leads, other=0).to(tl.int32)
        alphanumeric = _alphanumeric(here)
        letter = tl.where(leads, ((bits & _START) != 0) & ((bits & _MARK) == 0), alphanumeric)
        unsegmented = leads & ((bits & _UNSEGMENTED) != 0)
        found |= (letter & ((opened == 0) | unsegmented)).to(tl.int32) << byte
        # Marks and the later bytes of a character leave things as they are.
        passed = ((here >= 0x80) & (here < 0xC0)) | (leads & ((bits & _MARK) != 0))
        opened = tl.where(passed, opened, (letter & ~unsegmented).to(tl.int32))
    return found


@triton.jit
def _open_before(data, begins, classes, at, inside):
    """1 where the last character before `at` that is no mark belongs to a word that goes on; one that `at` cuts counts
    as before it."""
    opened = tl.zeros_like(at)
    place = at
    looks = inside
    while tl.max(looks.to(tl.int32), axis=0) > 0:
        begun = tl.load(begins + (place >> 3), mask=looks, other=0).to(tl.int32) >> (place & 7) & 1
        looks = looks & (place > 0) & (begun == 0)
        place = tl.where(looks, place - 1, place)
        here = tl.load(data + place, mask=looks, other=0).to(tl.int32)
        for _ in tl.static_range(3):
            later = looks & (here >= 0x80) & (here < 0xC0) & (place > 0)
            place = tl.where(later, place - 1, place)
            here = tl.where(later, tl.load(data + place, mask=later, other=0).to(tl.int32), here)
        leads = looks & (here >= 0xC0)
        point, _ = _decoded(_block_at(data, place, leads))
        bits = tl.load(classes + tl.where(leads, point, 0), mask=leads, other=0).to(tl.int32)
        mark = leads & ((bits & _MARK) != 0)
        segmented = ((bits & _START) != 0) & ((bits & _UNSEGMENTED) == 0)
        goes_on = tl.where(leads, segmented, _alphanumeric(here))
        opened = tl.where(looks & ~mark, goes_on.to(tl.int32), opened)
        looks = mark
    return opened


@triton.jit
def _ascii(block):
    """(the eight bytes in lower case, the high bit of each byte that is an ASCII letter or digit)."""
    low = block & _LOW
    lower = low | _LOWER
    narrow = (block & _HIGH) ^ _HIGH
    letters = (lower + _FROM_A) & (lower + _PAST_Z ^ _HIGH) & narrow
    digits = (low + _FROM_0) & (low + _PAST_9 ^ _HIGH) & narrow
    return block | letters >> 2, letters | digits


@triton.jit
def _alphanumeric(byte):
    lower = byte | 0x20
    return ((lower >= 0x61) & (lower <= 0x7A)) | ((byte >= 0x30) & (byte <= 0x39))


@triton.jit
def _packed(marks):
    """The high bits of eight bytes as the eight low bits of a number."""
    return ((marks >> 7) * _GATHER >> 49).to(tl.int32) & 0xFF


@triton.jit
def _bits(byte):
    """How many bits of a byte are set."""
    pairs = byte - (byte >> 1 & 0x55)
    fours = (pairs & 0x33) + (pairs >> 2 & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit
def _decoded(block):
    """(code point, bytes) of the character that eight bytes of valid UTF-8 begin with, one beyond ASCII."""
    lead = (block & 0xFF).to(tl.int32)
    second, third = (block >> 8 & 0x3F).to(tl.int32), (block >> 16 & 0x3F).to(tl.int32)
    fourth = (block >> 24 & 0x3F).to(tl.int32)
    two = (lead & 0x1F) << 6 | second
    three = (lead & 0x0F) << 12 | second << 6 | third
    four = (lead & 0x07) << 18 | second << 12 | third << 6 | fourth
    point = tl.where(lead < 0xE0, two, tl.where(lead < 0xF0, three, four))
    return point, tl.where(lead < 0xE0, 2, tl.where(lead < 0xF0, 3, 4))


@triton.jit
def _block(data, at, mask):
    """Eight bytes from `at` on, a multiple of eight."""
    return tl.load(data.to(tl.pointer_type(tl.uint64)) + (at >> 3), mask=mask, other=0)


@triton.jit
def _block_at(data, at, mask):
    """Eight bytes from `at` on."""
    numbers = data.to(tl.pointer_type(tl.uint64)) + (at >> 3)
    shift = ((at & 7) * 8).to(tl.uint64)
    low = tl.load(numbers, mask=mask, other=0)
    high = tl.load(numbers + 1, mask=mask, other=0)
    # In two steps, since a shift by 64 is not defined.
    return low >> shift | (high << 1) << (63 - shift)
