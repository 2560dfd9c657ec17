"""Copies of windows -> spans that tile what is repeated, each with the place of its bytes in the text that stays."""

from __future__ import annotations

import numpy as np
from numba import njit

from ..columns import Bytes, Offsets, Rows
from .windows import is_inside


@njit(cache=True, nogil=True)
def settle(
    text: Bytes, bounds: Offsets, copies: Rows, index: int, at: int, until: int, spans: Rows, count: int
) -> tuple[int, int, int]:
    """Adds the spans that `copies` cover from `at` on to the first `count` rows of `spans`; (index, at, count) then.

    A row (start, stop, kept) says that `text[start:stop]` goes and that its bytes stay at `text[kept:]`. `copies`
    ascend; `copies[index]` is the first to look at, and all that start before `until` are there. Stops where a span
    would begin at `until` or later, or when `spans` is full.

    A span takes over as many characters as agree with the kept text it points to. Where they end, the last copy that
    has begun tells where to go on: at its source, or where the source of the source stayed if that went too. Sources
    lie before their copies, so this ends; and it depends on windows alone, not on the rows that join them.
    """
    limit = _kept_until(bounds, spans, count, spans[count - 1, 2]) if count else 0
    while index < len(copies):
        while index + 1 < len(copies) and copies[index + 1, 0] <= at:
            index += 1
        start, stop, source = copies[index]
        at = max(at, start)
        if at >= stop:
            index += 1
            continue
        reached = at
        # A span ends with its document, even where the next one begins with a copy.
        if count and spans[count - 1, 1] == at and (spans[count - 1, 0] == at or not _is_bound(bounds, at)):
            reached = _agree_until(text, at, stop, spans[count - 1, 2] + at - spans[count - 1, 0], limit)
        if reached > at:
            spans[count - 1, 1] = reached
        elif count == len(spans) or at >= until:
            break
        else:
            kept = _kept(spans, count, source + at - start)
            spans[count, 0], spans[count, 1], spans[count, 2] = at, at, kept
            count += 1
            limit = _kept_until(bounds, spans, count, kept)
        at = reached
    return index, at, count


@njit(cache=True, nogil=True)
def cut(data: Bytes, offsets: Offsets, bounds: Offsets, starts: Offsets, stops: Offsets, out: Bytes) -> Offsets:
    """Writes each document without its spans to `out`; returns the new offsets.

    Document i has the spans `bounds[i]` to `bounds[i + 1]`, in order, counted in bytes from its start.
    """
    places = np.zeros(len(offsets), np.int64)
    place = 0
    for document in range(len(offsets) - 1):
        begin = offsets[document]
        at = begin
        for span in range(bounds[document], bounds[document + 1]):
            size = begin + starts[span] - at
            out[place : place + size] = data[at : at + size]
            place += size
            at = begin + stops[span]
        size = offsets[document + 1] - at
        out[place : place + size] = data[at : at + size]
        place += size
        places[document + 1] = place
    return places


@njit(cache=True, nogil=True)
def _agree_until(text: Bytes, at: int, stop: int, kept: int, limit: int) -> int:
    """Where the whole characters of `text[at:stop]` end that agree with those of `text[kept:limit]`."""
    reached = at
    while reached < stop and kept < limit and text[reached] == text[kept]:
        reached += 1
        kept += 1
    while at < reached < stop and is_inside(text[reached]):
        reached -= 1
    return reached


@njit(cache=True, nogil=True)
def _kept(spans: Rows, count: int, at: int) -> int:
    """Where the byte at `at` stays: there, or where the span that holds it points to."""
    index = _last_at(spans, count, at)
    if index >= 0 and at < spans[index, 1]:
        return int(spans[index, 2]) + at - int(spans[index, 0])
    return at


@njit(cache=True, nogil=True)
def _kept_until(bounds: Offsets, spans: Rows, count: int, kept: int) -> int:
    """Where the text that stays at `kept` ends: at the next span or at the end of the document."""
    end = bounds[np.searchsorted(bounds, kept, side="right")]
    index = _last_at(spans, count, kept) + 1
    return int(min(end, spans[index, 0]) if index < count else end)


@njit(cache=True, nogil=True)
def _last_at(spans: Rows, count: int, at: int) -> int:
    """The last span that starts at or before `at`; -1 for none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if spans[middle, 0] <= at:
            low = middle + 1
        else:
            high = middle
    return low - 1


@njit(cache=True, nogil=True)
def _is_bound(bounds: Offsets, at: int) -> bool:
    return bool(bounds[np.searchsorted(bounds, at)] == at)
