"""Hashes of words on the device -> MinHash signatures and their band keys: those of `kernels/minhash.py`, bit by bit.

A program signs up to SEGMENT shingles of one document and lowers the document's minima by atomic operations, so long
documents are spread over the device and short ones cost little. Shingles stay in registers while all functions pass
over them: three instructions (xor, multiply, minimum) for each pair, and one reduction over the warp for each function
and tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

SHINGLES = 256
"""Shingles that a program hashes."""
SEGMENT = 2048
"""Most shingles that a program signs: with 80 functions some 20 microseconds of one warp."""
DOCUMENTS = 128
"""Documents whose keys a program folds."""

# The constants of kernels/shingles.py and kernels/minhash.py.
_ROLL = tl.constexpr(0xD1342543DE82EF95)
_FINISH = tl.constexpr(0xC4CEB9FE1A85EC53)
_SEED = tl.constexpr(0x9E3779B97F4A7C15)
_FOLD = tl.constexpr(0xFF51AFD7ED558CCD)
_LARGE, _SMALL = tl.constexpr(512), tl.constexpr(64)


@triton.jit
def hash_shingles(hashes, total, shingles, WIDTH: tl.constexpr, SHINGLES: tl.constexpr):
    """The low half of the hash of each run of WIDTH words, by its first word; runs over two documents are not used."""
    words = tl.load(total)
    first = tl.program_id(0) * SHINGLES
    if first < words:
        index = first + tl.arange(0, SHINGLES)
        rolled = tl.zeros([SHINGLES], tl.uint64)
        for step in tl.static_range(WIDTH):
            here = index + step < words
            rolled = rolled * _ROLL + tl.load(hashes + index + step, mask=here, other=0).to(tl.uint64, bitcast=True)
        tl.store(shingles + index, _mixed(rolled), mask=index < words)


@triton.jit
def sign(
    hashes,
    shingles,
    first_words,
    documents,
    first_segments,
    flips,
    factors,
    minima,
    WIDTH: tl.constexpr,
    FUNCTIONS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Lowers `minima` (document, function) by one segment of a document; those that begin after its end do nothing."""
    segment = tl.program_id(0)
    document = tl.load(documents + segment)
    first = tl.load(first_words + document)
    words = tl.load(first_words + document + 1) - first
    into = minima + document.to(tl.int64) * FUNCTIONS
    begin = (segment - tl.load(first_segments + document)) * SEGMENT
    end = tl.minimum(words - WIDTH + 1, begin + SEGMENT)
    while end - begin > _LARGE // 2:
        _sign_tile(shingles + first, begin, end, flips, factors, into, FUNCTIONS, _LARGE)
        begin += _LARGE
    while begin < end:
        _sign_tile(shingles + first, begin, end, flips, factors, into, FUNCTIONS, _SMALL)
        begin += _SMALL
    if (words > 0) & (words < WIDTH):
        rolled = tl.zeros([1], tl.uint64)
        for word in range(words):
            rolled = rolled * _ROLL + tl.load(hashes + first + word).to(tl.uint64, bitcast=True)
        only = _mixed(rolled + words.to(tl.uint64))
        for start in range(0, FUNCTIONS, 32):
            function = start + tl.arange(0, 32)
            here = function < FUNCTIONS
            value = (only ^ tl.load(flips + function, mask=here)) * tl.load(factors + function, mask=here)
            tl.store(into + function, value, mask=here)


@triton.jit
def fold(minima, first_words, keys, documents, ROWS: tl.constexpr, BANDS: tl.constexpr, DOCUMENTS: tl.constexpr):
    """One 64-bit key for the rows of each band: `keys` (band, document); 0 for a document without words."""
    document = tl.program_id(0) * DOCUMENTS + tl.arange(0, DOCUMENTS)
    band = tl.program_id(1)
    here = document < documents
    first = tl.load(first_words + document, mask=here, other=0)
    words = tl.load(first_words + document + 1, mask=here, other=0) - first
    row = minima + document.to(tl.int64) * (BANDS * ROWS) + band * ROWS
    key = tl.full([DOCUMENTS], _SEED, tl.uint64)
    for place in range(ROWS):
        key = (key ^ tl.load(row + place, mask=here, other=0).to(tl.uint64)) * _FOLD
        key = key ^ key >> 32
    key = tl.where(words > 0, tl.where(key == 0, 1, key), 0)
    tl.store(keys + band.to(tl.int64) * documents + document, key.to(tl.int64, bitcast=True), mask=here)


@triton.jit
def _sign_tile(shingles, begin, end, flips, factors, into, FUNCTIONS: tl.constexpr, TILE: tl.constexpr):
    # Places beyond the end repeat the last shingle, which changes no minimum.
    tile = tl.load(shingles + tl.minimum(begin + tl.arange(0, TILE), end - 1))
    lanes = tl.arange(0, 32)
    # The minima of 32 functions are gathered in the lanes of the warp, for one atomic operation.
    for first in range(0, FUNCTIONS, 32):
        least = tl.full([32], 0xFFFFFFFF, tl.uint32)
        for lane in range(tl.minimum(32, FUNCTIONS - first)):
            values = (tile ^ tl.load(flips + first + lane)) * tl.load(factors + first + lane)
            least = tl.where(lanes == lane, tl.min(values, axis=0), least)
        tl.atomic_min(into + first + lanes, least, mask=first + lanes < FUNCTIONS, sem="relaxed")


@triton.jit
def _mixed(rolled):
    """The low half of a shingle's hash."""
    rolled = (rolled ^ rolled >> 32) * _FINISH
    rolled = rolled ^ rolled >> 32
    return tl.where(rolled == 0, 1, rolled).to(tl.uint32)
