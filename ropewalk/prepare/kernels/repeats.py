"""The first equal of every window, by hash and then by bytes, and the samples worth looking at.

`count_keys` and `select` leave the samples (see `minimizers`) whose key may occur twice. `match` looks each of their
windows up in a hash table of the windows before it. A hit is compared byte by byte, so that a collision of hashes costs
time and is never taken for a repeat.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Offsets, Rows
from .minimizers import BASE, Hashes, mix
from .windows import BYTES, Classes, ends_word, first_window, next_window

_INVERSE = np.uint64(pow(int(BASE), -1, 1 << 64))
_ZERO, _ONE = np.uint64(0), np.uint64(1)
# An entry of the table: 24 bits of the hash, then 40 of the window's start + 1.
PLACE_BITS = 40
_MARK = np.uint64(1 << PLACE_BITS)
_PLACE = np.uint64((1 << PLACE_BITS) - 1)


@njit(cache=True, nogil=True)
def count_keys(keys: Hashes, counters: Bytes, shift: np.uint64) -> None:
    """Counts keys to two, in counters of two bits, four a byte; keys that share a counter are counted together."""
    for key in keys:
        slot = key >> shift
        bit = np.uint8((slot & np.uint64(3)) << _ONE)
        byte = slot >> np.uint64(2)
        if (counters[byte] >> bit) & 3 < 2:
            counters[byte] += np.uint8(1) << bit


@njit(cache=True, nogil=True)
def select(
    starts: npt.NDArray[np.uint32],
    keys: Hashes,
    begin: int,
    end: int,
    bounds: Offsets,
    counters: Bytes,
    shift: np.uint64,
    parts: int,
    rows: Rows,
    places: npt.NDArray[np.int32],
) -> int:
    """Writes (first start, end of starts) of the samples whose key was counted twice; returns their number.

    `places` tells to which of `parts` parts each belongs. It follows the key: equal windows meet in one part.
    """
    count = 0
    document = np.searchsorted(bounds, begin, side="right") - 1
    for index in range(len(keys)):
        slot = keys[index] >> shift
        bit = np.uint8((slot & np.uint64(3)) << _ONE)
        if (counters[slot >> np.uint64(2)] >> bit) & 3 == 2:
            start = begin + np.int64(starts[index])
            while bounds[document + 1] <= start:
                document += 1
            following = begin + np.int64(starts[index + 1]) if index + 1 < len(keys) else end
            rows[count, 0] = start
            rows[count, 1] = min(following, bounds[document + 1])
            # The low bits: the high ones chose the counter.
            places[count] = np.int32((keys[index] & np.uint64(0xFFFFFFFF)) % np.uint64(parts))
            count += 1
    return count


@njit(cache=True, nogil=True)
def scatter(rows: Rows, places: npt.NDArray[np.int32], cursors: Offsets, out: Rows) -> None:
    """Writes each row where the cursor of its place stands, and moves the cursor on."""
    for index in range(len(rows)):
        place = places[index]
        out[cursors[place], 0], out[cursors[place], 1] = rows[index, 0], rows[index, 1]
        cursors[place] += 1


@njit(cache=True, nogil=True)
def match(
    text: Bytes,
    bounds: Offsets,
    candidates: Rows,
    begin: int,
    length: int,
    unit: int,
    classes: Classes,
    values: Hashes,
    turns: int,
    turn: int,
    table: Hashes,
    copies: Rows,
) -> tuple[int, int]:
    """Looks up the windows of `candidates[begin:]`; (the candidate to go on with, rows written to `copies`).

    A row (start, stop, source) says that every window in `text[start:stop]` is a copy, and that the first equal of each
    lies at the same distance in `text[source:]`. A window that overlaps its first equal is no copy: `aaaa` does not
    repeat `aaa`. Rows ascend. Windows whose hash is not `turn` modulo `turns` are left to another call.

    `table` has more places than there are windows, a power of two; it begins with zeros and goes from call to call.
    """
    mask = np.uint64(len(table) - 1)
    hashed, power = _ZERO, _ONE
    front = back = 0  # `hashed` is the hash of text[front:back], `power` is BASE to the power of its length
    begin_of_document = end_of_document = 0
    count = 0
    expected = -1  # the window that follows the last copy
    for index in range(begin, len(candidates)):
        at, until = candidates[index]
        if count + until - at > len(copies):
            return index, count
        if at >= end_of_document:
            document = np.searchsorted(bounds, at, side="right") - 1
            begin_of_document, end_of_document = bounds[document], bounds[document + 1]
        start, stop = first_window(text, at, begin_of_document, end_of_document, length, unit, classes)
        while stop >= 0 and start < until:
            if start < front or start >= back:
                front = back = start
                hashed, power = _ZERO, _ONE
            while front < start:
                hashed = (hashed - values[text[front]]) * _INVERSE
                power *= _INVERSE
                front += 1
            while back < stop:
                hashed += values[text[back]] * power
                power *= BASE
                back += 1
            key = mix(hashed)
            following, following_stop = next_window(text, start, stop, end_of_document, length, unit, classes)
            if turns == 1 or mix(key) % np.uint64(turns) == np.uint64(turn):
                # Of a copy that goes on as expected, only what is new has to be compared.
                known, distance = start, 0
                if start == expected and start <= copies[count - 1, 1]:
                    known, distance = copies[count - 1, 1], copies[count - 1, 0] - copies[count - 1, 2]
                slot = key & mask
                first = 0
                while table[slot]:
                    if table[slot] ^ key < _MARK:
                        first = int(np.int64(table[slot] & _PLACE)) - 1
                        compared = known if distance == start - first else start
                        if _equal(text, compared, first - start + compared, stop - compared) and (
                            unit == BYTES or ends_word(text, first + stop - start, bounds, classes)
                        ):
                            break
                    slot = slot + _ONE & mask
                if not table[slot]:
                    table[slot] = key & ~_PLACE | np.uint64(start + 1)
                elif first + stop - start <= start:
                    if distance == start - first:
                        copies[count - 1, 1] = stop
                    else:
                        copies[count, 0], copies[count, 1], copies[count, 2] = start, stop, first
                        count += 1
                    expected = following if following_stop >= 0 else -1
            start, stop = following, following_stop
    return len(candidates), count


@njit(cache=True, nogil=True)
def _equal(text: Bytes, one: int, other: int, size: int) -> bool:
    index = 0
    while index < size and text[one + index] == text[other + index]:
        index += 1
    return index == size
