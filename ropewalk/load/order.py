"""The order of the data as a function: row i of the run is computed from (seed, sources, i), never stored. No torch.

Each source's token stream is cut into windows of one row. An epoch reads every window once, in the order of a keyed
permutation (a Feistel network, O(1) an index, no memory). Sources are mixed in periods of fixed composition. So
resuming is remembering one integer, and any number of ranks can read any part of the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.base.seeds import seed_for

PERIOD = 1024
"""Rows after which the mixture repeats: weights are met to 1/1024, each source with at least one row a period."""

Indices = npt.NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio, the increment of splitmix64: tells the rounds of one key apart."""

ROUNDS = 8
"""Rounds of the Feistel network. Four leave a bias on sizes below a dozen, where half the bits are one or two; the
chi-square test of positions sees it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the run: window `window` of source `source`, read in epoch `epoch`."""

    source: int
    window: int
    epoch: int


class Order:
    """The global sequence of rows for `windows[s]` windows and mixture weight `weights[s]` of each source s."""

    def __init__(self, windows: Sequence[int], weights: Sequence[float], *, seed: int) -> None:
        _check(windows, weights)
        self._windows = np.array(windows, np.int64)
        self._shares = np.array(_shares(weights), np.int64)
        self._seed = seed
        mixed = np.repeat(np.arange(len(windows)), self._shares)
        slots = permuted(np.arange(PERIOD, dtype=np.uint64), PERIOD, seed_for(seed, "mixture"))
        self._source_of = mixed[slots.astype(np.int64)]
        # How many rows of the same source stand before each slot of a period.
        self._rank_of = np.zeros(PERIOD, np.int64)
        for source in range(len(windows)):
            here = np.flatnonzero(self._source_of == source)
            self._rank_of[here] = np.arange(len(here))
        # Rows are computed a period at a time, vectorised: 6 us a row, where one at a time they took 107 us.
        self._period = functools.lru_cache(maxsize=4)(self._compute_period)

    def row(self, index: int) -> Row:
        """Row `index` of the run, counted from 0 over all steps and ranks."""
        period, slot = divmod(index, PERIOD)
        return self._period(period)[slot]

    def rows(self, start: int, count: int, *, stride: int = 1) -> list[Row]:
        """`count` rows: `start`, `start + stride`, ..."""
        return [self.row(start + stride * number) for number in range(count)]

    def epochs(self, rows: int) -> list[float]:
        """How often each source has been read after `rows` rows."""
        return [float(value) for value in rows / PERIOD * self._shares / self._windows]

    def _compute_period(self, period: int) -> list[Row]:
        source = self._source_of
        epoch, place = np.divmod(period * self._shares[source] + self._rank_of, self._windows[source])
        pairs = list(zip(source.tolist(), epoch.tolist(), strict=True))
        seeds = {pair: seed_for(self._seed, "order", *pair) for pair in set(pairs)}
        keys = np.array([seeds[pair] for pair in pairs], np.uint64)
        window = _permute(place.astype(np.uint64), self._windows[source].astype(np.uint64), keys)
        return [Row(s, w, e) for (s, e), w in zip(pairs, window.tolist(), strict=True)]


def permuted(indices: Indices, size: int, key: int) -> Indices:
    """Where the permutation `key` of 0..size-1 sends each index: a Feistel network with cycle walking."""
    sizes, keys = (np.full(indices.shape, value, np.uint64) for value in (size, key))
    return _permute(indices.astype(np.uint64), sizes, keys)


def _permute(values: Indices, sizes: Indices, keys: Indices) -> Indices:
    """Value i through permutation keys[i] of 0..sizes[i]-1.

    The network permutes the next even power of two; results outside are sent on until they fall inside, which takes
    fewer than four passes on average.
    """
    # Half of each network's bits. frexp gives the bit length, exact below 2**53.
    half = np.maximum(1, (np.frexp((sizes - np.uint64(1)).astype(np.float64))[1] + 1) // 2).astype(np.uint64)
    result = _feistel(values, half, keys)
    while (outside := result >= sizes).any():
        result[outside] = _feistel(result[outside], half[outside], keys[outside])
    return result


def _feistel(values: Indices, half: Indices, keys: Indices) -> Indices:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for number in range(1, ROUNDS + 1):
        # The key is added before mixing: a round that only multiplied would send zero to zero under every key.
        left, right = right, left ^ (_mix(_mix(keys + np.uint64(number * GOLDEN % 2**64)) + right) & mask)
    return (left << half) | right


def _mix(values: Indices) -> Indices:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _check(windows: Sequence[int], weights: Sequence[float]) -> None:
    for source, count in enumerate(windows):
        if count < 1:
            raise DataError(
                f"source {source} has not one row of training tokens; shorten `load.sequence_length`, "
                "add documents or drop the source"
            )
    if not 1 <= len(windows) <= PERIOD:
        raise DataError(f"{len(windows)} sources cannot be mixed; give 1 to {PERIOD}, joining small ones")
    if not all(0 < weight < float("inf") for weight in weights):
        raise DataError(f"the weights of the sources are {list(weights)}; each must be above 0 and finite")


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
