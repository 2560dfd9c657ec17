"""Documents cut into units (lines, sentences or paragraphs), and what the line-wise rules ask of each.

Units of a document follow each other; blank lines belong to none. A sentence takes the white space behind it along.
What is taken out of a text is a list of spans; `unit_spans` makes those of dropped units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ..columns import Bytes, Mask, Offsets
from .numbering import Counts
from .phrases import Phrases, look_up, phrase_start, phrases_at
from .words import (
    BRACKET,
    CAPITAL,
    FACTOR,
    LETTER,
    LOWER,
    QUOTE,
    SEED,
    SHIFT,
    SPACE,
    START,
    TERMINAL,
    UNSEGMENTED,
    WIDE,
    Characters,
    added,
    decode,
    extends,
    finished,
)

JAVASCRIPT, POLICY, COUNTER, STARTS, ENDS, ANYWHERE = (1 << place for place in range(6))
"""What a phrase is: its bits in the table of `describe`."""

FEATURES = ("words", "letters", "capitals", "longest", "ended", "kinds", "counted", "cut_words")
"""Of a unit: its words, letters and capitals; the longest stretch without white space or a letter of a script without
spaces; whether it ends as a sentence does (a mark or a quotation mark, no ellipsis); the bits of its phrases; whether
it is numbers and COUNTER words; words in phrases that are cut out."""
_WORDS, _LETTERS, _CAPITALS, _LONGEST, _ENDED, _KINDS, _COUNTED, _CUT_WORDS = range(len(FEATURES))

_DOT, _NEWLINE, _OPEN, _CLOSE = ord("."), ord("\n"), ord("["), ord("]")
_MARKS = (np.frombuffer(b"edit]", np.uint8), np.frombuffer(b"citation needed]", np.uint8))


class Units(NamedTuple):
    """Where units stand in the data."""

    starts: Offsets
    ends: Offsets
    bounds: Offsets
    """Document i has the units `bounds[i]` to `bounds[i + 1]`."""


@njit(cache=True, nogil=True)
def split_lines(data: Bytes, offsets: Offsets, unicode: Characters) -> Units:
    """The lines that are not blank, without their line ends."""
    documents = offsets.size - 1
    room = documents
    for place in range(offsets[0], offsets[documents]):
        room += data[place] == _NEWLINE
    starts, ends = np.empty(room, np.int64), np.empty(room, np.int64)
    bounds = np.zeros(documents + 1, np.int64)
    found = 0
    for document in range(documents):
        i, end = offsets[document], offsets[document + 1]
        while i < end:
            start = i
            inked = False
            while i < end and data[i] != _NEWLINE and not inked:
                code, i = decode(data, i, end)
                inked = not unicode.classes[code] & SPACE
            k: Any = np.uint64(i)  # numba asks of a signed index whether it counts from the end: twice as slow here
            while k < np.uint64(end) and data[k] != _NEWLINE:
                k += np.uint64(1)
            i = np.int64(k)
            if inked:
                starts[found], ends[found] = start, i
                found += 1
            i += 1
        bounds[document + 1] = found
    return Units(starts[:found].copy(), ends[:found].copy(), bounds)


@njit(cache=True, nogil=True)
def split_sentences(data: Bytes, lines: Units, unicode: Characters) -> Units:
    """The sentences of lines, as `statistics` counts them; a line without words is one."""
    classes = unicode.classes
    starts, ends = np.empty(2 * lines.starts.size + 16, np.int64), np.empty(2 * lines.starts.size + 16, np.int64)
    bounds = np.zeros_like(lines.bounds)
    found = 0
    for document in range(lines.bounds.size - 1):
        for line in range(lines.bounds[document], lines.bounds[document + 1]):
            i, end = lines.starts[line], lines.ends[line]
            start = i
            cut = i  # behind the mark, what closes it and white space
            opened = inside = soft = False
            ending = 0
            wide: Any = 0
            unsegmented: Any = 0
            while i < end:
                at = i
                code, i = decode(data, i, end)
                bits: Any = np.int64(classes[code])
                if inside and extends(bits, unsegmented):
                    continue
                inside = bits & START != 0
                if inside:
                    unsegmented = bits & UNSEGMENTED
                    if opened and ending and (wide or (ending == 2 and not (soft and bits & LOWER))):
                        if found + 1 >= starts.size:
                            starts = np.concatenate((starts, np.empty_like(starts)))
                            ends = np.concatenate((ends, np.empty_like(ends)))
                        starts[found], ends[found] = start, cut
                        found += 1
                        start = cut
                    ending = wide = 0
                    opened = True
                elif bits & SPACE:
                    cut = i if ending and cut == at else cut
                    ending += ending == 1
                elif bits & TERMINAL:
                    soft = code == _DOT and (soft or ending != 1)
                    wide |= bits & WIDE
                    ending = 1
                    cut = i
                elif ending == 1 and bits & (QUOTE | BRACKET):
                    cut = i if cut == at else cut
                elif ending == 1 and not wide:
                    ending = 0
            if found + 1 >= starts.size:
                starts = np.concatenate((starts, np.empty_like(starts)))
                ends = np.concatenate((ends, np.empty_like(ends)))
            starts[found], ends[found] = start, end
            found += 1
        bounds[document + 1] = found
    return Units(starts[:found].copy(), ends[:found].copy(), bounds)


@njit(cache=True, nogil=True)
def describe(
    data: Bytes, units: Units, unicode: Characters, phrases: Phrases, pattern_words: int, citations: bool
) -> tuple[Counts, Counts]:
    """(features, cuts): a row of FEATURES a unit, and rows (unit, start, end) of what is to be cut out of units.

    Citation marks are cut where `citations` says so, phrases with the bits STARTS, ENDS and ANYWHERE in units of at
    most `pattern_words` words.
    """
    classes, folds = unicode.classes, unicode.folds
    keys, marks = phrases.keys, phrases.bits
    features = np.zeros((units.starts.size, len(FEATURES)), np.int64)
    cuts = np.empty((64, 3), np.int64)
    cut = 0
    room = 2
    for unit in range(units.starts.size):
        room = max(room, (units.ends[unit] - units.starts[unit]) // 2 + 2)
    words = np.empty(room, np.uint64)
    places = np.empty((room, 2), np.int64)
    for unit in range(units.starts.size):
        row = features[unit]
        i, end = units.starts[unit], units.ends[unit]
        found = numbers = stretch = longest = dots = 0
        letters: Any = 0
        capitals: Any = 0
        last: Any = 0
        after_dot = -1
        while i < end:
            at = i
            code, i = decode(data, i, end)
            bits: Any = np.int64(classes[code])
            if bits & START:
                unsegmented = bits & UNSEGMENTED
                numbers += bits & LETTER == 0
                if unsegmented:
                    longest, stretch = max(longest, stretch), 0
                state = added(SEED, code, bits, folds)
                size = 1
                word_letters: Any = bits & LETTER
                word_capitals = np.int64(bits & CAPITAL != 0)
                while i < end:
                    code = np.int64(data[i])
                    if code < 0x80:  # as in `statistics`
                        bits = np.int64(classes[code])
                        if not bits & START or unsegmented:
                            break
                        state = (state ^ np.uint64(code + (bits & SHIFT))) * FACTOR
                        i += 1
                    else:
                        code, after = decode(data, i, end)
                        bits = np.int64(classes[code])
                        if not extends(bits, unsegmented):
                            break
                        state = added(state, code, bits, folds)
                        i = after
                    size += 1
                    word_letters += bits & LETTER
                    word_capitals += bits & CAPITAL != 0
                letters += word_letters
                capitals += word_capitals
                stretch += size if not unsegmented else 0
                words[found] = finished(state)
                places[found, 0], places[found, 1] = at, i
                found += 1
                last = dots = 0
            elif bits & SPACE:
                longest, stretch = max(longest, stretch), 0
            else:
                stop = _citation_end(data, i, end) if citations and code == _OPEN else -1
                if stop > 0:
                    cuts, cut = _append(cuts, cut, unit, at, stop)
                    i = stop
                    continue
                stretch += 1
                last = bits
                dots = (dots + 1 if at == after_dot else 1) if code == _DOT else 0
                after_dot = i
        row[_WORDS] = found
        row[_LETTERS] = letters
        row[_CAPITALS] = capitals
        row[_LONGEST] = max(longest, stretch)
        row[_ENDED] = last & (TERMINAL | QUOTE) != 0 and dots < 3
        counters = 0
        for k in range(found):
            if look_up(keys, marks, words[k]):
                kinds = phrases_at(keys, marks, words, 0, k)
                row[_KINDS] |= kinds
                counters += kinds & COUNTER != 0
        row[_COUNTED] = numbers > 0 and counters > 0 and numbers + counters == found
        if row[_KINDS] & (STARTS | ENDS | ANYWHERE) and found <= pattern_words:
            free = 0  # the first word that is in no phrase yet
            for k in range(found - 1, -1, -1):
                if phrase_start(keys, marks, words, 0, k, STARTS) == 0:
                    stop = places[k + 1, 0] if k + 1 < found else end
                    cuts, cut = _append(cuts, cut, unit, units.starts[unit], stop)
                    free = row[_CUT_WORDS] = k + 1
                    break
            for k in range(free, found):
                wanted = ANYWHERE | (ENDS if k == found - 1 else 0)
                first = phrase_start(keys, marks, words, free, k, wanted)
                if first >= free:
                    stop = end if k == found - 1 else places[k, 1]
                    cuts, cut = _append(cuts, cut, unit, places[first, 0], stop)
                    row[_CUT_WORDS] += k + 1 - first
                    free = k + 1
    return features, cuts[:cut].copy()


@njit(cache=True, nogil=True)
def unit_spans(units: Units, offsets: Offsets, dropped: Mask) -> Offsets:
    """Where the cut behind each dropped unit ends: a whole line goes with its line end.

    The blank lines behind it go too where blank lines, or nothing, stand before: one gap is left of two.
    """
    stops = units.ends.copy()
    for document in range(offsets.size - 1):
        unit, last, end = units.bounds[document], units.bounds[document + 1], offsets[document + 1]
        gap_before = True
        while unit < last:
            after = unit + 1
            kept = not dropped[unit]
            while after < last and units.starts[after] == units.ends[after - 1]:  # in the same line
                kept |= not dropped[after]
                after += 1
            line_end = min(units.ends[after - 1] + 1, end)
            next_line = units.starts[after] if after < last else end
            if kept:
                gap_before = next_line > line_end
            elif gap_before:
                stops[after - 1] = next_line
            else:
                stops[after - 1] = line_end
                gap_before = next_line > line_end
            unit = after
    return stops


@njit(cache=True, nogil=True)
def copy_without(data: Bytes, begin: int, end: int, starts: Offsets, stops: Offsets, out: Bytes) -> None:
    """Writes `data[begin:end]` to `out` without the spans, which follow each other."""
    place = np.uint64(0)  # numba asks of a signed index whether it counts from the end: ten times as slow here
    for span in range(starts.size + 1):
        stop = starts[span] if span < starts.size else end
        for k in range(np.uint64(begin), np.uint64(stop)):
            out[place] = data[k]
            place += np.uint64(1)
        begin = stops[span] if span < starts.size else end


@njit(cache=True, nogil=True)
def _citation_end(data: Bytes, i: int, end: int) -> int:
    """Where [12], [edit] or [citation needed] ends whose bracket opens before `i`; -1 when it is none of them."""
    k = i
    while k < end and 48 <= data[k] < 58:
        k += 1
    if k < end and data[k] == _CLOSE:
        return k + 1
    for mark in _MARKS:
        if i + mark.size <= end and np.array_equal(data[i : i + mark.size], mark):
            return i + mark.size
    return -1


@njit(cache=True, nogil=True)
def _append(rows: Counts, count: int, unit: int, start: int, end: int) -> tuple[Counts, int]:
    if count == len(rows):
        rows = np.concatenate((rows, np.empty_like(rows)))
    rows[count, 0], rows[count, 1], rows[count, 2] = unit, start, end
    return rows, count + 1
