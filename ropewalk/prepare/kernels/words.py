"""What a word is, and its hash: the one definition that filters, near-duplicates and word lists share.

- A word is a run of letters and digits (Unicode categories L and N) with the marks that follow them (M, joiners and the
  soft hyphen: they extend a word and never begin one). All else separates words: `don't` is two, `snake_case` too.
- Scripts that put no space between words (Han, kana, Bopomofo, Yi, Thai, Lao, Khmer, Myanmar, Tai, Javanese, Balinese)
  give one word a letter, with its marks. Single characters and not pairs: they need no dictionary, they do not depend
  on where a run begins, so that equal passages have equal words at any offset, and n of them in a row are the
  character n-grams that work on Chinese uses.
- Case makes no difference: a letter counts as its lower case when that is one character.
- A symbol is a stretch between white space that holds no word (`-`, `=>`, `...`). It is no word; some rules count it.

Text is decoded from UTF-8 inside the kernels. What a character is comes from one table of bits, made from `unicodedata`
at its first use (0.1 s) and handed to the kernels as an argument, so that compiled code does not depend on it.
"""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from ..columns import Bytes, Offsets, text_buffers

WORDS_ID = f"words-1/unicode-{unicodedata.unidata_version}"
"""Names this definition; what is stored with word hashes or counts of words names it too."""

Hashes = npt.NDArray[np.uint64]
Classes = npt.NDArray[np.uint16]
Folds = npt.NDArray[np.uint32]

LETTER = 1
DIGIT = 2
MARK = 4
SPACE = 8
UNSEGMENTED = 16  # a letter of a script without spaces: a word of its own
SHIFT = 32  # the lower case is 32 further on, as the bit's value says: true of most capitals in use
FOLD = 64  # the lower case is in the table of folds
LOWER = 128
TERMINAL = 256  # ends a sentence
WIDE = 512  # a terminal that no space follows
QUOTE = 1024  # a quotation mark that closes (or may)
BRACKET = 2048  # a bracket that closes
BULLET = 4096
START = LETTER | DIGIT  # begins a word
CAPITAL = SHIFT | FOLD

SEED = np.uint64(0x9E3779B97F4A7C15)
FACTOR = np.uint64(0xD6E8FEB86659FD93)


class Characters(NamedTuple):
    """What the kernels know of Unicode."""

    classes: Classes
    """The bits above of every code point."""
    folds: Folds
    """The lower case of every code point below 0x20000 (none has one above)."""


def word_hashes(data: Bytes, offsets: Offsets) -> tuple[Hashes, Offsets]:
    """(hashes, starts): the words of text i have the hashes `hashes[starts[i] : starts[i + 1]]`, in order."""
    return _word_hashes(data, offsets, *characters())


def hashes_of(texts: Iterable[str]) -> list[tuple[int, ...]]:
    """The hashes of the words of each text, for tables that kernels look words up in."""
    hashes, starts = word_hashes(*text_buffers(pa.array(texts, pa.large_string())))
    return [tuple(hashes[a:b].tolist()) for a, b in itertools.pairwise(starts)]


@njit(cache=True, nogil=True)
def decode(data: Bytes, i: int, end: int) -> tuple[Any, int]:
    """(code point, where the next begins). A sequence cut short by `end` is U+FFFD, one byte long."""
    lead = np.int64(data[i])
    if lead < 0x80:
        return lead, i + 1
    if lead < 0xE0 and i + 1 < end:
        return (lead & 0x1F) << 6 | np.int64(data[i + 1]) & 0x3F, i + 2
    if lead < 0xF0 and i + 2 < end:
        return (lead & 0x0F) << 12 | (np.int64(data[i + 1]) & 0x3F) << 6 | np.int64(data[i + 2]) & 0x3F, i + 3
    if i + 3 < end:
        high = (lead & 0x07) << 18 | (np.int64(data[i + 1]) & 0x3F) << 12
        return high | (np.int64(data[i + 2]) & 0x3F) << 6 | np.int64(data[i + 3]) & 0x3F, i + 4
    return np.int64(0xFFFD), i + 1


@njit(cache=True, nogil=True)
def extends(bits: Any, unsegmented: Any) -> bool:
    """Whether a character of class `bits` goes on with a word whose first one has this UNSEGMENTED bit."""
    return bool(bits & MARK or (bits & START and not (bits | unsegmented) & UNSEGMENTED))


@njit(cache=True, nogil=True)
def added(state: Any, code: Any, bits: Any, folds: Folds) -> Any:
    """The state of a word's hash after one more character."""
    code += bits & SHIFT
    if bits & FOLD:
        code = np.int64(folds[code])
    return (state ^ np.uint64(code)) * FACTOR


@njit(cache=True, nogil=True)
def finished(state: Any) -> Any:
    """The hash of a word whose characters have all been added to SEED."""
    return state ^ (state >> np.uint64(32))


@njit(cache=True, nogil=True)
def _word_hashes(data: Bytes, offsets: Offsets, classes: Classes, folds: Folds) -> tuple[Hashes, Offsets]:
    documents = offsets.size - 1
    starts = np.zeros(documents + 1, np.int64)
    # Two bytes a word at least: itself and what separates it.
    hashes = np.empty((offsets[documents] - offsets[0] + documents) // 2 + 1, np.uint64)
    found = 0
    for document in range(documents):
        i, end = offsets[document], offsets[document + 1]
        inside = False
        state = SEED
        unsegmented = np.int64(0)
        # One loop over characters, not one over words: a function that reads a word and returns four values made this
        # twice as slow on English and four times on Chinese.
        while i < end:
            code, i = decode(data, i, end)
            bits = np.int64(classes[code])
            if inside and not extends(bits, unsegmented):
                hashes[found] = finished(state)
                found += 1
                inside = False
            if inside:
                state = added(state, code, bits, folds)
            elif bits & START:
                inside = True
                state = added(SEED, code, bits, folds)
                unsegmented = bits & UNSEGMENTED
        if inside:
            hashes[found] = finished(state)
            found += 1
        starts[document + 1] = found
    return hashes[:found].copy(), starts


_UNSEGMENTED_BLOCKS = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF)),  # Thai and Lao, Myanmar, Khmer
    *((0x1950, 0x19FF), (0x1A20, 0x1AAF), (0x1B00, 0x1B7F)),  # Tai Le to Khmer symbols, Tai Tham, Balinese
    *((0x2E80, 0x2FDF), (0x3000, 0x312F), (0x31A0, 0x31FF)),  # radicals, CJK signs, kana and Bopomofo, their extensions
    *((0x3400, 0x4DBF), (0x4E00, 0xA4CF), (0xA980, 0xA9FF)),  # Han, Han and Yi, Javanese and Myanmar
    *((0xAA60, 0xAADF), (0xF900, 0xFAFF), (0xFF66, 0xFF9F)),  # Myanmar and Tai Viet, Han, halfwidth kana
    *((0x1AFF0, 0x1B16F), (0x20000, 0x3FFFF)),  # kana, Han
)
# Unicode's own list of sentence ends is not part of Python; their names tell them well enough in living scripts.
_TERMINAL_NAMES = re.compile(
    r"FULL STOP|QUESTION MARK|EXCLAMATION MARK|INTERROBANG|DANDA|TIBETAN.* SHAD|KHMER SIGN KHAN|MYANMAR SIGN.* SECTION"
)
_NOT_TERMINAL_NAMES = re.compile(r"INVERTED|INITIAL|ARMENIAN (QUESTION|EXCLAMATION)|GREEK QUESTION|VERTICAL")
_QUOTES = "\"'」』﹂﹄｣"
_BULLETS = "-•‣⁃◦∙▪■□●○"  # no en dash and no asterisk: lines of dialogue and emphasis begin with them
_JOINERS = "\u200c\u200d\u00ad"


@functools.cache
def characters() -> Characters:
    """The table of this Python's Unicode."""
    categories = np.array([unicodedata.category(chr(code)) for code in range(0x34000)])
    major = categories.astype("U1")
    known = np.zeros(len(categories), np.uint16)
    known[major == "L"] |= LETTER
    known[major == "N"] |= DIGIT
    known[major == "M"] |= MARK
    known[categories == "Ll"] |= LOWER
    known[categories == "Pf"] |= QUOTE
    known[categories == "Pe"] |= BRACKET
    known[[code for code in range(0x3001) if chr(code).isspace()]] |= SPACE
    written = (major == "L") | (categories == "Nl")
    for first, last in _UNSEGMENTED_BLOCKS:
        known[first : last + 1][written[first : last + 1]] |= UNSEGMENTED
    for bit, members in ((QUOTE, _QUOTES), (BULLET, _BULLETS), (MARK, _JOINERS)):
        known[list(map(ord, members))] |= bit
    for code in map(int, np.flatnonzero(categories == "Po")):
        name = unicodedata.name(chr(code))
        if _TERMINAL_NAMES.search(name) and not _NOT_TERMINAL_NAMES.search(name):
            unspaced = any(first <= code <= last for first, last in _UNSEGMENTED_BLOCKS)
            wide = unspaced or unicodedata.east_asian_width(chr(code)) in "WFH"
            known[code] |= TERMINAL | (WIDE if wide else 0)
    folds = np.arange(0x20000, dtype=np.uint32)
    for code in map(int, np.flatnonzero(np.isin(categories, ("Lu", "Lt", "Nl")))):
        lower = chr(code).lower()
        if len(lower) == 1 and lower != chr(code):
            folds[code] = ord(lower)
            known[code] |= SHIFT if ord(lower) == code + SHIFT else FOLD
    classes = np.zeros(0x200000, np.uint16)  # all that four bytes can say, so that no sequence leads outside
    classes[: len(known)] = known
    classes[0xE0100:0xE01F0] = MARK  # variation selectors, the only other marks
    for table in (classes, folds):
        table.flags.writeable = False
    return Characters(classes, folds)
