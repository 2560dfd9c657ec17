"""All counts that the rules compare, from one pass over the bytes of each document.

The pass reads characters once and leaves three short lists behind: the words, the lines and the paragraphs, each as a
hash and a length. Repetition is then counted on these lists (`numbering`). `ropewalk.prepare.statistics` says what each
column means. Equal hashes of two different words or lines are the only way to a wrong count: 64 bits make that less
likely than one in 10^9 for a document of 100,000 words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ..columns import Bytes, Offsets
from .numbering import (
    Counts,
    Numbering,
    count_copies,
    duplicate_characters,
    make_numbering,
    narrow,
    number,
    top_characters,
)
from .phrases import KINDS, LENGTHS, Phrases, look_up, phrases_at
from .words import (
    BRACKET,
    BULLET,
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
    Hashes,
    added,
    characters,
    decode,
    extends,
    finished,
)

COLUMNS = (
    *("bytes", "characters", "visible_characters", "letters", "line_ends", "line_characters", "all_lines"),
    *("lines", "short_lines", "long_lines", "bullet_lines", "ellipsis_lines", "terminal_lines"),
    *("lorem_ipsum_lines", "javascript_lines", "policy_lines"),
    *("duplicate_lines", "duplicate_line_characters"),
    *("paragraphs", "duplicate_paragraphs", "duplicate_paragraph_characters", "sentences"),
    *("words", "pieces", "unsegmented_words", "alphabetic_words", "word_characters", "stop_words"),
    *("hash_signs", "ellipses", "curly_brackets"),
    *("top_2_gram_characters", "top_3_gram_characters", "top_4_gram_characters"),
    *("duplicate_5_gram_characters", "duplicate_6_gram_characters", "duplicate_7_gram_characters"),
    *("duplicate_8_gram_characters", "duplicate_9_gram_characters", "duplicate_10_gram_characters"),
)

SHORT_LINE = 30
"""Characters of a short line at most (FineWeb)."""
LETTER_WIDTH = 3
"""Characters that a letter of a script without spaces counts for in a short line. On 2,421 help pages with English and
Chinese text side by side, FineWeb's rule about short lines removes 11 % of the English pages, and of the Chinese ones
56 % when a letter counts 1, 27 % for 2, 14 % for 3, 10 % for 4."""
LONG_LINE = 200
"""Characters of a long line at least (mC4)."""

LOREM_IPSUM, JAVASCRIPT, POLICY = (np.int64(1 << KINDS - place) for place in (3, 2, 1))
"""Bits of phrases whose lines are counted."""
STOP_WORDS = KINDS - 3
"""Most stop words that one pass can tell apart; number i has bit i."""

_LINE_KINDS = LOREM_IPSUM | JAVASCRIPT | POLICY
_DOT, _HASH, _CURLY, _NEWLINE, _ELLIPSIS = ord("."), ord("#"), ord("{"), ord("\n"), ord("…")

# Where each column stands. Kernels take global integers as constants.
_BYTES, _CHARACTERS, _VISIBLE, _LETTERS, _LINE_ENDS, _LINE_CHARACTERS, _ALL_LINES = range(7)
_LINES, _SHORT, _LONG, _BULLETS, _ELLIPSIS_LINES, _TERMINALS = range(7, 13)
_LOREM_IPSUM, _JAVASCRIPT, _POLICY = range(13, 16)
_DUPLICATE_LINES = 16
_PARAGRAPHS, _DUPLICATE_PARAGRAPHS, _SENTENCES = 18, 19, 21
_WORDS, _PIECES, _UNSEGMENTED, _ALPHABETIC, _WORD_CHARACTERS, _STOP_WORDS = range(22, 28)
_HASHES, _ELLIPSES, _CURLIES = range(28, 31)
_TOP_2 = 31  # and the columns behind it, up to n = 10


class Lists(NamedTuple):
    """What the pass over a document's characters leaves behind."""

    words: Hashes
    sizes: Counts
    """Characters of the words before each."""
    joints: Counts
    """How many words up to and with the one before stand directly behind another: no space is written between."""
    line_keys: Hashes
    line_sizes: Counts
    line_words: Counts
    """The number of words before each line."""
    paragraph_keys: Hashes
    paragraph_sizes: Counts


def count(data: Bytes, offsets: Offsets, phrases: Phrases) -> Counts:
    """One row a document, one column a name of COLUMNS. Of `phrases`, bits below STOP_WORDS are stop words."""
    return _count(data, offsets, characters(), phrases)


@njit(cache=True, nogil=True)
def _count(data: Bytes, offsets: Offsets, unicode: Characters, phrases: Phrases) -> Counts:
    documents = offsets.size - 1
    rows = np.zeros((documents, len(COLUMNS)), np.int64)
    room = 2  # a word or a line takes two bytes with what follows it; room that is not touched costs nothing
    for document in range(documents):
        room = max(room, (offsets[document + 1] - offsets[document]) // 2 + 2)
    lists = Lists(
        np.empty(room, np.uint64),
        np.zeros(room + 1, np.int64),
        np.zeros(room + 1, np.int64),
        np.empty(room, np.uint64),
        np.empty(room, np.int64),
        np.zeros(room + 1, np.int64),
        np.empty(room, np.uint64),
        np.empty(room, np.int64),
    )
    numbering = make_numbering(room)
    for document in range(documents):
        row = rows[document]
        _scan(data, offsets[document], offsets[document + 1], unicode, row, lists)
        number(lists.line_keys, row[_LINES], numbering)
        row[_DUPLICATE_LINES], row[_DUPLICATE_LINES + 1] = count_copies(lists.line_sizes, row[_LINES], numbering)
        number(lists.paragraph_keys, row[_PARAGRAPHS], numbering)
        copies, size = count_copies(lists.paragraph_sizes, row[_PARAGRAPHS], numbering)
        row[_DUPLICATE_PARAGRAPHS], row[_DUPLICATE_PARAGRAPHS + 1] = copies, size
        distinct = number(lists.words, row[_WORDS], numbering)
        _count_phrases(lists, distinct, numbering, phrases, row)
        _count_repeats(lists, numbering, row)
    return rows


@njit(cache=True, nogil=True)
def _scan(data: Bytes, begin: int, end: int, unicode: Characters, row: Counts, lists: Lists) -> None:
    """Reads the characters of one document: counts into `row`, words, lines and paragraphs into `lists`."""
    classes, folds = unicode.classes, unicode.folds
    words, sizes, joints = lists.words, lists.sizes, lists.joints
    length = spaces = letters = line_ends = 0
    lines = paragraphs = sentences = 0
    short = long = bullets = ellipsis_lines = terminals = 0
    found = symbols = unsegmented_words = alphabetic = 0
    hash_signs = ellipses = curly_brackets = 0
    unsegmented: Any = 0  # of the last word
    word_length = joined = 0
    # since the last white space
    visible = False
    worded = False
    # the line
    line_begin = begin
    line_length = line_unsegmented = 0  # `length` and `unsegmented_words` where it begins
    inked = False
    last: Any = 0  # class of the last visible character, 0 when it is part of a word
    last_code: Any = 0  # and its code point
    dots = 0  # full stops at the end of what was read
    after_dot = -1
    # the sentence: whether it has a word, and what may have ended it
    opened = False
    ending = 0  # 1 behind a mark, 2 behind a mark and white space
    soft = False  # all its marks are full stops
    wide: Any = 0
    # the paragraph
    paragraph_key = SEED
    paragraph_size = 0
    # `code`, of class `bits`, stands at `at`; `i` is behind it. The end of the document is read as a line end.
    at = begin
    code, i = _read(data, begin, end)
    while at <= end:
        bits = np.int64(classes[code])
        if bits & START:
            inked = worded = True
            last = last_code = dots = 0
            if ending:
                if wide or (ending == 2 and not (soft and bits & LOWER)):
                    sentences += opened
                ending = wide = 0
            opened = True
            joined += bits & unsegmented != 0
            joints[found + 1] = joined
            unsegmented = bits & UNSEGMENTED
            unsegmented_words += unsegmented != 0
            state = added(SEED, code, bits, folds)
            size = 1
            word_letters: Any = bits & LETTER
            while True:
                at = i
                code, i = _read(data, i, end)
                bits = np.int64(classes[code])
                if code < 0x80:  # what `extends` and `added` say of ASCII, a third faster
                    if not bits & START or unsegmented:
                        break
                    state = (state ^ np.uint64(code + (bits & SHIFT))) * FACTOR
                else:
                    if not extends(bits, unsegmented):
                        break
                    state = added(state, code, bits, folds)
                size += 1
                word_letters += bits & LETTER
            words[found] = finished(state)
            found += 1
            length += size
            word_length += size
            sizes[found] = word_length
            letters += word_letters
            alphabetic += word_letters > 0
            continue
        if not bits & SPACE:
            length += 1
            visible = True
            bullets += not inked and bits & BULLET != 0
            inked = True
            last, last_code = bits, code
            if code == _DOT:
                dots = dots + 1 if at == after_dot else 1
                after_dot = i
                ellipses += dots % 3 == 0
            else:
                dots = 0
                hash_signs += code == _HASH
                ellipses += code == _ELLIPSIS
                curly_brackets += code == _CURLY
            if bits & TERMINAL:
                soft = code == _DOT and (soft or ending != 1)
                wide |= bits & WIDE
                ending = 1
            elif ending == 1 and not bits & (QUOTE | BRACKET) and not wide:
                ending = 0
        else:
            symbols += visible and not worded
            visible = worded = False
            if code != _NEWLINE:
                length += 1
                spaces += 1
                ending += ending == 1
            else:
                if inked:
                    size = length - line_length
                    short += size + (LETTER_WIDTH - 1) * (unsegmented_words - line_unsegmented) <= SHORT_LINE
                    long += size >= LONG_LINE
                    ellipsis_lines += dots >= 3 or last_code == _ELLIPSIS
                    terminals += last & TERMINAL != 0
                    sentences += opened
                    line_key = _line_key(data, line_begin, at)
                    lists.line_keys[lines] = line_key
                    lists.line_sizes[lines] = size
                    lines += 1
                    paragraph_size += size + (paragraph_size > 0)
                    paragraph_key = (paragraph_key ^ line_key) * FACTOR
                if paragraph_size and (not inked or at == end):
                    lists.paragraph_keys[paragraphs] = finished(paragraph_key)
                    lists.paragraph_sizes[paragraphs] = paragraph_size
                    paragraphs += 1
                    paragraph_key = SEED
                    paragraph_size = 0
                lists.line_words[lines] = found
                inked = opened = False
                ending = wide = last = last_code = dots = 0
                line_begin = i
                if at < end:
                    length += 1
                    spaces += 1
                    line_ends += 1
                line_length, line_unsegmented = length, unsegmented_words
        at = i
        code, i = _read(data, i, end)
    row[_BYTES] = end - begin
    row[_CHARACTERS] = length
    row[_VISIBLE] = length - spaces
    row[_LETTERS] = letters
    row[_LINE_ENDS] = line_ends
    row[_LINE_CHARACTERS] = length - line_ends
    row[_ALL_LINES] = line_ends + (end > begin and data[end - 1] != _NEWLINE)
    row[_LINES] = lines
    row[_SHORT] = short
    row[_LONG] = long
    row[_BULLETS] = bullets
    row[_ELLIPSIS_LINES] = ellipsis_lines
    row[_TERMINALS] = terminals
    row[_PARAGRAPHS] = paragraphs
    row[_SENTENCES] = sentences
    row[_WORDS] = found
    row[_PIECES] = found + symbols
    row[_UNSEGMENTED] = unsegmented_words
    row[_ALPHABETIC] = alphabetic
    row[_WORD_CHARACTERS] = sizes[found]
    row[_HASHES] = hash_signs
    row[_ELLIPSES] = ellipses
    row[_CURLIES] = curly_brackets


@njit(cache=True, nogil=True)
def _read(data: Bytes, i: int, end: int) -> tuple[Any, int]:
    """(code point, where the next begins); a line end for what is at the end."""
    if i < end:
        return decode(data, i, end)
    return np.int64(_NEWLINE), i + 1


@njit(cache=True, nogil=True)
def _line_key(data: Bytes, begin: int, end: int) -> Any:
    """A hash of bytes, eight at a time (the compiler makes one load of the eight)."""
    state = SEED
    i = begin
    while i + 8 <= end:
        j = np.uint64(i)  # numba asks of a signed index whether it counts from the end
        block = np.uint64(0)
        for k in range(8):
            block |= np.uint64(data[j + np.uint64(k)]) << np.uint64(8 * k)
        state = (state ^ block) * FACTOR
        state ^= state >> np.uint64(32)
        i += 8
    block = np.uint64(end - begin)
    while i < end:
        block = block << np.uint64(8) | np.uint64(data[i])
        i += 1
    state = (state ^ block) * FACTOR
    return finished(state)


@njit(cache=True, nogil=True)
def _count_phrases(lists: Lists, distinct: int, numbering: Numbering, phrases: Phrases, row: Counts) -> None:
    """Writes how many stop words occur, and how many lines hold a phrase of each kind. The words are numbered."""
    keys, bits = phrases.keys, phrases.bits
    seen = np.int64(0)
    for k in range(distinct):
        seen |= look_up(keys, bits, lists.words[numbering.firsts[k]])
    if seen & (_LINE_KINDS | LENGTHS):
        for line in range(row[_LINES]):
            begin, end = lists.line_words[line], lists.line_words[line + 1]
            kinds = np.int64(0)
            for k in range(begin, end):
                if look_up(keys, bits, lists.words[k]):
                    kinds |= phrases_at(keys, bits, lists.words, begin, k)
            row[_LOREM_IPSUM] += kinds & LOREM_IPSUM != 0
            row[_JAVASCRIPT] += kinds & JAVASCRIPT != 0
            row[_POLICY] += kinds & POLICY != 0
            seen |= kinds
    seen &= (np.int64(1) << STOP_WORDS) - 1
    while seen:
        seen &= seen - 1
        row[_STOP_WORDS] += 1


@njit(cache=True, nogil=True)
def _count_repeats(lists: Lists, numbering: Numbering, row: Counts) -> None:
    """Writes the n-gram columns. The words are numbered."""
    words = row[_WORDS]
    left = words
    for k in range(words):
        numbering.positions[k] = k
    for n in range(2, 11):
        left = narrow(left, numbering)
        if n > 4 and not left:
            break
        distinct = number(numbering.pairs, left, numbering)
        if words < n:
            size = 0
        elif n <= 4:
            size = top_characters(lists.sizes, lists.joints, n, distinct, numbering)
        else:
            size = duplicate_characters(lists.sizes, n, left, numbering)
        row[_TOP_2 + n - 2] = size
