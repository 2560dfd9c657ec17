"""The suffix array of a text, one lexicographic range after the other, as deep as windows reach.

Suffixes are compared no further than the end of the window that begins them (a truncated suffix array): equal windows
then lie side by side, and nothing else is asked of it. A range of the array is collected and sorted by itself, without
those before and after it, so that memory is what one range takes (blockwise suffix sorting, Kärkkäinen 2007). The sort
is multikey quicksort with cached keys (Bentley and Sedgewick 1997; Ng and Kakehi 2007). No hash plays a part.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Offsets
from .windows import Classes, first_window, next_window

Keys = npt.NDArray[np.uint64]

_STEP = 7
"""Bytes of a window in one key. The key's last byte tells how many there were, so that an end sorts before any byte."""
_SMALL = 12
"""Up to so many windows, insertion is quicker."""
_STACK = 256
"""Ranges that wait: two for each halving, as the largest part waits longest."""


@njit(cache=True, nogil=True)
def draw(
    text: Bytes, bounds: Offsets, stride: int, length: int, unit: int, classes: Classes, starts: Offsets, stops: Offsets
) -> int:
    """Writes every `stride`-th window as far as there is room; returns the number of all windows."""
    count = 0
    for document in range(len(bounds) - 1):
        begin, end = bounds[document], bounds[document + 1]
        start, stop = first_window(text, begin, begin, end, length, unit, classes)
        while stop >= 0:
            if count % stride == 0 and count // stride < len(starts):
                starts[count // stride], stops[count // stride] = start, stop
            count += 1
            start, stop = next_window(text, start, stop, end, length, unit, classes)
    return count


@njit(cache=True, nogil=True)
def collect(
    text: Bytes,
    bounds: Offsets,
    least: Offsets,
    most: Offsets,
    length: int,
    unit: int,
    classes: Classes,
    starts: Offsets,
    stops: Offsets,
) -> int:
    """Writes the windows from `least` up to but without `most`, in order of the text; returns their number.

    `least` and `most` are (start, stop) of windows, or empty for no limit. Counts on when there is no room.
    """
    least_key = _key(text, least[0], least[1]) if len(least) else np.uint64(0)
    most_key = _key(text, most[0], most[1]) if len(most) else np.uint64(0xFFFFFFFFFFFFFFFF)
    least_byte, most_byte = least_key >> np.uint64(56), most_key >> np.uint64(56)
    count = 0
    for document in range(len(bounds) - 1):
        begin, end = bounds[document], bounds[document + 1]
        start, stop = first_window(text, begin, begin, end, length, unit, classes)
        while stop >= 0:
            # The first byte sends most windows away; only those at a limit are compared as a whole.
            if least_byte <= text[start] <= most_byte:
                key = _key(text, start, stop)
                if least_key <= key <= most_key:
                    below = key == least_key and len(least) and _precedes(text, start, stop, least[0], least[1])
                    above = key == most_key and len(most) and not _precedes(text, start, stop, most[0], most[1])
                    if not (below or above):
                        if count < len(starts):
                            starts[count], stops[count] = start, stop
                        count += 1
            start, stop = next_window(text, start, stop, end, length, unit, classes)
    return count


@njit(cache=True, nogil=True)
def compact(starts: Offsets, stops: Offsets, firsts: Keys) -> int:
    """Brings the copies among windows to the front; returns their number.

    A window that overlaps its first equal is no copy of it.
    """
    count = 0
    for index in range(len(starts)):
        if np.int64(firsts[index]) + stops[index] - starts[index] <= starts[index]:
            starts[count], stops[count], firsts[count] = starts[index], stops[index], firsts[index]
            count += 1
    return count


@njit(cache=True, nogil=True)
def sort(text: Bytes, starts: Offsets, stops: Offsets, firsts: Keys) -> None:
    """Sorts windows lexicographically, and writes to `firsts` the least start of those equal to each."""
    keys = firsts
    for index in range(len(starts)):
        keys[index] = _key(text, starts[index], stops[index])
    waiting = np.empty((_STACK, 3), np.int64)
    waiting[0] = 0, len(starts), 0
    count = 1
    while count:
        count -= 1
        low, high, depth = waiting[count]
        if high - low <= _SMALL:
            _insert(text, starts, stops, keys, low, high, depth)
            continue
        pivot = _median(keys[low], keys[(low + high) // 2], keys[high - 1])
        below, above = _part(starts, stops, keys, low, high, pivot)
        if pivot & np.uint64(0xFF) < _STEP:
            _name(starts, keys, below, above)
            above_depth, middle = depth, below
        else:
            for index in range(below, above):
                keys[index] = _key(text, starts[index] + depth + _STEP, stops[index])
            above_depth, middle = depth + _STEP, above
        parts = ((low, below, depth), (below, middle, above_depth), (above, high, depth))
        sizes = (below - low, middle - below, high - above)
        largest = 0 if sizes[0] >= max(sizes[1], sizes[2]) else 1 if sizes[1] >= sizes[2] else 2
        for offset in range(3):
            part = parts[(largest + offset) % 3]
            if part[0] < part[1]:
                waiting[count] = part
                count += 1


@njit(cache=True, nogil=True)
def _key(text: Bytes, at: int, stop: int) -> np.uint64:
    key = np.uint64(0)
    size = max(0, min(_STEP, stop - at))
    for index in range(size):
        key = key << np.uint64(8) | np.uint64(text[at + index])
    return key << np.uint64(8 * (_STEP + 1 - size)) | np.uint64(size)


@njit(cache=True, nogil=True)
def _precedes(text: Bytes, one: int, one_stop: int, other: int, other_stop: int) -> bool:
    """Whether `text[one:one_stop]` sorts before `text[other:other_stop]`."""
    while one < one_stop and other < other_stop:
        if text[one] != text[other]:
            return bool(text[one] < text[other])
        one += 1
        other += 1
    return one >= one_stop and other < other_stop


@njit(cache=True, nogil=True)
def _part(starts: Offsets, stops: Offsets, keys: Keys, low: int, high: int, pivot: np.uint64) -> tuple[int, int]:
    """Brings windows below, at and above `pivot` together, in this order; where those at it begin and end."""
    below, at, above = low, low, high
    while at < above:
        if keys[at] < pivot:
            _swap(starts, stops, keys, at, below)
            below += 1
            at += 1
        elif keys[at] > pivot:
            above -= 1
            _swap(starts, stops, keys, at, above)
        else:
            at += 1
    return below, above


@njit(cache=True, nogil=True)
def _insert(text: Bytes, starts: Offsets, stops: Offsets, keys: Keys, low: int, high: int, depth: int) -> None:
    """Sorts and names a few windows that agree in their first `depth` bytes."""
    for index in range(low + 1, high):
        place = index
        while place > low and keys[place] <= keys[place - 1]:
            if keys[place] == keys[place - 1] and not _precedes(
                text, starts[place] + depth, stops[place], starts[place - 1] + depth, stops[place - 1]
            ):
                break
            _swap(starts, stops, keys, place, place - 1)
            place -= 1
    first = low
    for index in range(low + 1, high + 1):
        same = (
            index < high
            and keys[index] == keys[first]
            and not _precedes(text, starts[first] + depth, stops[first], starts[index] + depth, stops[index])
        )
        if not same:
            _name(starts, keys, first, index)
            first = index


@njit(cache=True, nogil=True)
def _name(starts: Offsets, keys: Keys, low: int, high: int) -> None:
    """Gives equal windows their name, the least of their starts, in the place of their keys."""
    name = starts[low]
    for index in range(low + 1, high):
        name = min(name, starts[index])
    for index in range(low, high):
        keys[index] = np.uint64(name)


@njit(cache=True, nogil=True)
def _swap(starts: Offsets, stops: Offsets, keys: Keys, one: int, other: int) -> None:
    starts[one], starts[other] = starts[other], starts[one]
    stops[one], stops[other] = stops[other], stops[one]
    keys[one], keys[other] = keys[other], keys[one]


@njit(cache=True, nogil=True)
def _median(one: np.uint64, two: np.uint64, three: np.uint64) -> np.uint64:
    if one > two:
        one, two = two, one
    return max(one, min(two, three))
