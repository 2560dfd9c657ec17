"""Windows of text: the shortest spans that count as repeated, in order of their starts.

In unit BYTES a window is a run of whole characters, at least `length` bytes long and as short as that allows; one
begins at every character. In unit WORDS it reaches from the start of a word to the end of the `length`-th; one begins
at every word (what a word is, `words` says). A window lies inside one document. Starts and stops both ascend.

Two windows are equal when their bytes are. A span is repeated when all its windows are, so whoever knows the first
equal of every window knows all repeated spans. As windows consist of whole characters, so do these: cutting them out
leaves valid UTF-8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Offsets
from .words import MARK, START, UNSEGMENTED, decode

Classes = npt.NDArray[np.uint16]

BYTES, WORDS = 0, 1


@njit(cache=True, nogil=True)
def first_window(
    text: Bytes, at: int, begin: int, end: int, length: int, unit: int, classes: Classes
) -> tuple[int, int]:
    """(start, stop) of the first window at or after `at` in the document `text[begin:end]`; stop is -1 for none."""
    while at < end and is_inside(text[at]):
        at += 1
    if unit == BYTES:
        return at, _byte_stop(text, at, end, length)
    if _continues_word(text, at, begin, end, classes):
        at = _after_word(text, at, end, classes)
    start = _next_start(text, at, end, classes)
    stop = start
    for _ in range(length):
        stop = _next_stop(text, stop, end, classes)
        if stop < 0:
            break
    return start, stop


@njit(cache=True, nogil=True)
def next_window(
    text: Bytes, start: int, stop: int, end: int, length: int, unit: int, classes: Classes
) -> tuple[int, int]:
    """The window that follows the window `text[start:stop]` of the document that ends at `end`; stop is -1 for none."""
    if unit == BYTES:
        start += 1
        while start < end and is_inside(text[start]):
            start += 1
        return start, _byte_stop(text, start, end, length)
    start = _next_start(text, _after_word(text, start, end, classes), end, classes)
    return start, _next_stop(text, stop, end, classes)


@njit(cache=True, nogil=True)
def ends_word(text: Bytes, at: int, bounds: Offsets, classes: Classes) -> bool:
    """Whether the word of the character before `at` goes no further, in the document that has this character."""
    document = np.searchsorted(bounds, at) - 1
    return not _continues_word(text, at, bounds[document], bounds[document + 1], classes)


@njit(cache=True, nogil=True)
def is_inside(byte: int) -> bool:
    """Whether a character began before this byte."""
    return byte & 0xC0 == 0x80


@njit(cache=True, nogil=True)
def _byte_stop(text: Bytes, start: int, end: int, length: int) -> int:
    stop = start + length
    if stop > end:
        return -1
    while stop < end and is_inside(text[stop]):
        stop += 1
    return stop


@njit(cache=True, nogil=True)
def _next_start(text: Bytes, at: int, end: int, classes: Classes) -> int:
    """Where the next word begins, at `at` or later; `at` is in no word. `end` for none."""
    while at < end:
        code, after = decode(text, at, end)
        if classes[code] & START:
            return at
        at = after
    return end


@njit(cache=True, nogil=True)
def _next_stop(text: Bytes, at: int, end: int, classes: Classes) -> int:
    """Where the next word ends; `at` is in no word. -1 for none."""
    start = _next_start(text, at, end, classes)
    return _after_word(text, start, end, classes) if start < end else -1


@njit(cache=True, nogil=True)
def _after_word(text: Bytes, at: int, end: int, classes: Classes) -> int:
    """Where the word ends that has a character at `at`."""
    code, at = decode(text, at, end)
    alone = classes[code] & UNSEGMENTED
    while at < end:
        code, after = decode(text, at, end)
        bits = classes[code]
        if not bits & MARK and (alone or bits & UNSEGMENTED or not bits & START):
            break
        at = after
    return at


@njit(cache=True, nogil=True)
def _continues_word(text: Bytes, at: int, begin: int, end: int, classes: Classes) -> bool:
    """Whether the character at `at` belongs to a word that began before it."""
    if at >= end:
        return False
    code, _ = decode(text, at, end)
    bits = classes[code]
    if bits & UNSEGMENTED or not bits & (START | MARK):
        return False
    # What stands before the marks decides: they extend a word and begin none.
    base = at
    while base > begin:
        base -= 1
        while base > begin and is_inside(text[base]):
            base -= 1
        code, _ = decode(text, base, end)
        before = classes[code]
        if before & START:
            return bool(bits & MARK) or not before & UNSEGMENTED
        if not before & MARK:
            return False
    return False
