"""Keyed permutations of 0..size-1, one index at a time: O(1), no memory. No torch.

A Feistel network over the next power of two, with cycle walking: a result outside of 0..size-1 is sent through the
network again until it falls inside, fewer than two passes on average. Every index is computed by itself, so that any
rank and any step find their place in an order that nobody has written down.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 / golden ratio, the increment of splitmix64: tells the rounds of one key apart, and the keys of one seed."""

ROUNDS = np.uint64(8)
"""Rounds of the network. Four leave a bias on sizes below a dozen, which the chi-square test of positions sees."""

LEAST_BITS = np.uint64(4)
"""Bits of the smallest network. With a part of a single bit, 12 rounds are needed before that test is content."""

_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
_FACTOR_1, _FACTOR_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)

Indices = npt.NDArray[np.int64]
Int = int | np.int64


def permuted(indices: Indices, size: int, key: int) -> Indices:
    """Where the permutation `key` of 0..size-1 sends each index."""
    return _permuted(np.asarray(indices, np.int64), size, np.uint64(key))


def unpermuted(indices: Indices, size: int, key: int) -> Indices:
    """The inverse of `permuted`."""
    return _unpermuted(np.asarray(indices, np.int64), size, np.uint64(key))


def places(rows: Indices, size: int, *, block: int = 0, together: int = 1, key: int, epoch: int) -> Indices:
    """The inverse of `row_at`: when each row of a source of `size` rows is read within `epoch`."""
    return _places(np.asarray(rows, np.int64), size, block, together, np.uint64(key), epoch)


def rows_in_turn(
    first: int, count: int, *, stride: int = 1, size: int, block: int = 0, together: int = 1, key: int
) -> tuple[Indices, Indices]:
    """(rows, their epochs) that a single source of `size` rows gives at the places `first`, `first + stride`, ... of
    all its epochs one after the other; the blocks are those of `row_at`."""
    return _rows_in_turn(first, count, stride, size, block, together, np.uint64(key))


@njit(cache=True, nogil=True)
def place_rows(
    row: int,
    stride: int,
    scale: int,
    cycle: npt.NDArray[np.int32],
    counts: Indices,
    sizes: Indices,
    keys: npt.NDArray[np.uint64],
    source: npt.NDArray[np.int32],
    number: Indices,
) -> None:
    """Fills `source` and `number` (times `scale`) for the rows `row`, `row + stride`, ... of a stretch of a mixture.

    `cycle` and `counts` are those of the stretch; `sizes` has the rows of each source, the rows of a block and the
    blocks of a group, `keys` its key. This and what else uses `row_at` stands in this file because the compiler's cache
    looks at one file: a kernel that called it from another would go on with the old one when it changes.
    """
    length = cycle.shape[1]
    for index in range(len(source)):
        period, slot = row // length, row % length
        one = cycle[0, slot]
        given = counts[0, one] + period * counts[1, one] + cycle[1, slot]
        epoch, place = given // sizes[0, one], given % sizes[0, one]
        source[index] = one
        number[index] = scale * row_at(place, sizes[0, one], sizes[1, one], sizes[2, one], keys[one], epoch)
        row += stride


@njit(cache=True, nogil=True)
def mix(value: np.uint64) -> np.uint64:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    value = (value ^ (value >> _SHIFT_1)) * _FACTOR_1
    value = (value ^ (value >> _SHIFT_2)) * _FACTOR_2
    return value ^ (value >> _SHIFT_3)


@njit(cache=True, nogil=True)
def _parts(size: Int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """The network for 0..size-1: bits of its right part, and masks of the right and the left one."""
    bits = LEAST_BITS
    while (_ONE << bits) < np.uint64(size):
        bits += _ONE
    half = bits >> _ONE
    return half, (_ONE << half) - _ONE, (_ONE << (bits - half)) - _ONE


@njit(cache=True, nogil=True)
def forward(index: Int, size: Int, key: np.uint64) -> Int:
    """Where the permutation `key` of 0..size-1 sends `index`."""
    if size < 2:
        return index
    half, low, high = _parts(size)
    value, bound = np.uint64(index), np.uint64(size)
    while True:
        left, right = value >> half, value & low
        # The two parts change in turn, so that an odd number of bits needs no larger network. The key is added before
        # mixing: a round that only multiplied would send zero to zero under every key.
        for number in range(_ONE, ROUNDS, 2):
            left ^= mix(mix(key + np.uint64(number) * GOLDEN) + right) & high
            right ^= mix(mix(key + np.uint64(number + 1) * GOLDEN) + left) & low
        value = (left << half) | right
        if value < bound:
            return np.int64(value)


@njit(cache=True, nogil=True)
def backward(index: Int, size: Int, key: np.uint64) -> Int:
    """The index that `forward` sends to `index`: the same rounds from the last to the first."""
    if size < 2:
        return index
    half, low, high = _parts(size)
    value, bound = np.uint64(index), np.uint64(size)
    while True:
        left, right = value >> half, value & low
        for number in range(ROUNDS - _ONE, 0, -2):
            right ^= mix(mix(key + np.uint64(number + 1) * GOLDEN) + left) & low
            left ^= mix(mix(key + np.uint64(number) * GOLDEN) + right) & high
        value = (left << half) | right
        if value < bound:
            return np.int64(value)


@njit(cache=True, nogil=True)
def row_at(place: Int, size: Int, block: Int, together: Int, key: np.uint64, epoch: Int) -> Int:
    """The row of a source of `size` rows that is read at `place` of `epoch`.

    With `block` 0 all rows are permuted. Otherwise blocks of `block` neighbouring rows are permuted, and then the rows
    of every `together` blocks among each other: what is open at a time is one such group or two, the last group with
    fewer than twice as many. The rows at the end that do not fill a block belong to it; every epoch begins at another
    place of the round, so that they are not always read last.
    """
    key = mix(key + np.uint64(epoch) * GOLDEN)
    if block == 0:
        return forward(place, size, key)
    blocks = size // block
    place = (place + np.int64(mix(key) >> _ONE) % size) % size
    group, start, length = _group_of(place, size, block, together)
    place = start + forward(place - start, length, mix(key + np.uint64(group + 1) * GOLDEN))
    if place < blocks * block:
        return forward(place // block, blocks, key) * block + place % block
    return place


@njit(cache=True, nogil=True)
def place_of(row: Int, size: Int, block: Int, together: Int, key: np.uint64, epoch: Int) -> Int:
    """The place within `epoch` at which `row_at` gives `row`."""
    key = mix(key + np.uint64(epoch) * GOLDEN)
    if block == 0:
        return backward(row, size, key)
    blocks = size // block
    place = row
    if place < blocks * block:
        place = backward(place // block, blocks, key) * block + place % block
    group, start, length = _group_of(place, size, block, together)
    place = start + backward(place - start, length, mix(key + np.uint64(group + 1) * GOLDEN))
    return (place - np.int64(mix(key) >> _ONE) % size) % size


@njit(cache=True, nogil=True)
def _group_of(place: Int, size: Int, block: Int, together: Int) -> tuple[Int, Int, Int]:
    """(number, first place, places) of the group of blocks that holds `place`; the last takes what is left over."""
    whole = together * block
    last = max(size // whole, 1) - 1
    group = min(place // whole, last)
    start = group * whole
    return group, start, (size - start if group == last else whole)


@njit(cache=True, nogil=True)
def _rows_in_turn(
    first: int, count: int, stride: int, size: int, block: int, together: int, key: np.uint64
) -> tuple[Indices, Indices]:
    rows, epochs = np.empty(count, np.int64), np.empty(count, np.int64)
    for number in range(count):
        place = first + number * stride
        epochs[number] = place // size
        rows[number] = row_at(place % size, size, block, together, key, epochs[number])
    return rows, epochs


@njit(cache=True, nogil=True)
def _permuted(indices: Indices, size: int, key: np.uint64) -> Indices:
    result = np.empty(len(indices), np.int64)
    for number in range(len(indices)):
        result[number] = forward(indices[number], size, key)
    return result


@njit(cache=True, nogil=True)
def _unpermuted(indices: Indices, size: int, key: np.uint64) -> Indices:
    result = np.empty(len(indices), np.int64)
    for number in range(len(indices)):
        result[number] = backward(indices[number], size, key)
    return result


@njit(cache=True, nogil=True)
def _places(rows: Indices, size: int, block: int, together: int, key: np.uint64, epoch: int) -> Indices:
    result = np.empty(len(rows), np.int64)
    for number in range(len(rows)):
        result[number] = place_of(rows[number], size, block, together, key, epoch)
    return result
