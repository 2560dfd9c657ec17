"""Lines and paragraphs of documents, each with a hash: what is compared to find those that occurred before."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Mask, Offsets, Rows

PIECES_ID = "pieces-1"
"""Names what a piece is and its hash."""

_NEWLINE = 10
_SPACE = 32
_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_SEED = np.uint64(0x9E3779B97F4A7C15)


@njit(cache=True, nogil=True)
def find_pieces(
    data: Bytes, offsets: Offsets, wanted: Mask, by_paragraph: bool, least: int
) -> tuple[npt.NDArray[np.uint64], Rows, Rows, Rows]:
    """(hash, row, start, stop) of every piece of the wanted documents, in order.

    A line ends with a newline; a paragraph is a run of lines with ink, and the blank lines behind it belong to it.
    `start` and `stop` are bytes within the document and take in what separates a piece from the next one. The hash is
    that of the bytes without surrounding white space; pieces with fewer than `least` of them are left out.
    """
    room = 0
    for row in range(len(wanted)):
        if wanted[row]:
            room += 1
            for i in range(offsets[row], offsets[row + 1]):
                room += data[i] == _NEWLINE
    hashes = np.empty(room, np.uint64)
    rows, starts, stops = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int64)
    count = 0
    for row in range(len(wanted)):
        if not wanted[row]:
            continue
        begin, end = offsets[row], offsets[row + 1]
        at = begin
        while at < end:
            stop, first, last = _line(data, at, end)
            if by_paragraph:
                inked, closed = first < stop, False
                while stop < end:
                    behind, ink, until = _line(data, stop, end)
                    if ink == behind:
                        closed = inked
                    elif closed:
                        break
                    else:
                        first, last, inked = first if inked else ink, until, True
                    stop = behind
            if last - first >= max(least, 1):
                hashes[count], rows[count] = _hash(data, first, last), row
                starts[count], stops[count] = at - begin, stop - begin
                count += 1
            at = stop
    return hashes[:count], rows[:count], starts[:count], stops[:count]


@njit(cache=True, nogil=True)
def _line(data: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """(where the next line begins, first byte with ink, end of ink); the first two are equal for a blank line."""
    stop = at
    while stop < end and data[stop] != _NEWLINE:
        stop += 1
    last = stop
    stop = min(stop + 1, end)
    first = at
    while first < last and data[first] <= _SPACE:
        first += 1
    if first == last:
        return stop, stop, stop
    while data[last - 1] <= _SPACE:
        last -= 1
    return stop, first, last


@njit(cache=True, nogil=True)
def _hash(data: Bytes, start: int, stop: int) -> np.uint64:
    state = _SEED
    for i in range(start, stop):
        state = (state ^ np.uint64(data[i])) * _FACTOR
    state ^= state >> np.uint64(32)
    state *= _FACTOR
    return state ^ (state >> np.uint64(29))
