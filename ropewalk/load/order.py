"""The order of the data as a function: row i of the run is computed from (seed, sources, i), never stored. No torch.

Each source's token stream is cut into windows of one row. An epoch reads every window once, in the order of a keyed
permutation (a Feistel network, O(1) an index, no memory). Sources are mixed in periods of fixed composition. So resuming is
remembering one integer, and any number of ranks can read any part of the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.base.seeds import seed_for

PERIOD = 1024
"""Rows after which the mixture repeats: weights are met to 1/1024, each source with at least one row a period."""

Indices = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the run: window `window` of source `source`, read in epoch `epoch`."""

    source: int
    window: int
    epoch: int


class Order:
    """The global sequence of rows for `windows[s]` windows and mixture weight `weights[s]` of each source s."""

    def __init__(self, windows: Sequence[int], weights: Sequence[float], *, seed: int) -> None:
        for source, count in enumerate(windows):
            if count < 1:
                raise DataError(
                    f"source {source} has not one row of training tokens; shorten `load.sequence_length`, "
                    "add documents or drop the source"
                )
        self._windows = list(windows)
        self._seed = seed
        self._shares = _shares(weights)
        mixed = np.repeat(np.arange(len(windows)), self._shares)
        slots = permuted(np.arange(PERIOD, dtype=np.uint64), PERIOD, seed_for(seed, "mixture"))
        self._source_of = mixed[slots.astype(np.int64)]
        # How many rows of the same source stand before each slot of a period.
        self._rank_of = np.zeros(PERIOD, np.int64)
        for source in range(len(windows)):
            here = np.flatnonzero(self._source_of == source)
            self._rank_of[here] = np.arange(len(here))

    def row(self, index: int) -> Row:
        """Row `index` of the run, counted from 0 over all steps and ranks."""
        period, slot = divmod(index, PERIOD)
        source = int(self._source_of[slot])
        turn = period * self._shares[source] + int(self._rank_of[slot])
        epoch, place = divmod(turn, self._windows[source])
        key = seed_for(self._seed, "order", source, epoch)
        window = permuted(np.array([place], np.uint64), self._windows[source], key)[0]
        return Row(source, int(window), epoch)

    def rows(self, start: int, count: int) -> list[Row]:
        """`count` rows from row `start` on."""
        return [self.row(index) for index in range(start, start + count)]

    def epochs(self, rows: int) -> list[float]:
        """How often each source has been read after `rows` rows."""
        return [rows / PERIOD * share / count for share, count in zip(self._shares, self._windows, strict=True)]


def permuted(indices: Indices, size: int, key: int, *, rounds: int = 4) -> Indices:
    """Where a keyed permutation of 0..size-1 sends each index: a Feistel network with cycle walking.

    The network permutes the next even power of two; results outside are sent on until they fall inside, which takes
    fewer than four rounds on average. Four rounds of a multiply-xorshift mix pass the tests of uniformity we ask for.
    """
    bits = max(2, (size - 1).bit_length())
    half = np.uint64((bits + 1) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.default_rng(key).integers(1, 2**63, rounds, dtype=np.uint64) | np.uint64(1)
    result = _feistel(indices.astype(np.uint64), half, mask, keys)
    outside = result >= size
    while outside.any():
        result[outside] = _feistel(result[outside], half, mask, keys)
        outside = result >= size
    return result


def _feistel(values: Indices, half: np.uint64, mask: np.uint64, keys: Indices) -> Indices:
    left, right = values >> half, values & mask
    with np.errstate(over="ignore"):
        for key in keys:
            mixed = right * key
            mixed ^= mixed >> np.uint64(29)
            mixed *= np.uint64(0xBF58476D1CE4E5B9)
            mixed ^= mixed >> np.uint64(32)
            left, right = right, left ^ (mixed & mask)
    return (left << half) | right


def _shares(weights: Sequence[float]) -> list[int]:
    """Rows of each source in a period: largest remainders, at least one each."""
    total = sum(weights)
    exact = [weight / total * PERIOD for weight in weights]
    shares = [max(1, int(value)) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda s: shares[s] - exact[s])
    for place in range(PERIOD - sum(shares)):
        shares[by_remainder[place % len(shares)]] += 1
    while sum(shares) > PERIOD:
        shares[shares.index(max(shares))] -= 1
    return shares
