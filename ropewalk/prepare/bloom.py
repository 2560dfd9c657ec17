"""Exact repeats in a fixed space: a Bloom filter that takes hashes in order and says which are new.

For streams longer than memory holds hashes of: documents, paragraphs or lines, whichever are hashed. A repeat is always
recognised. A first occurrence is taken for a repeat, and lost, with the stated rate at most, until more than the stated
number of different items have come; the filter knows which items repeat, not what they repeat.

The filter is blocked (Putze, Sanders and Singler 2007): all bits of an item lie in one cache line. Lines fill unevenly,
which costs bits (`rate` counts them in), and saves all but one access to memory. The answer depends on the hashes and
their order alone: feed them in canonical order.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .config import Bloom
from .kernels.bloom import BLOCK_BITS, insert_new
from .kernels.words import Hashes

ALGORITHM = "bloom-1"
"""Changes with everything that changes an answer."""
_MOST_PROBES = 24


class BloomFilter:
    """The filter of some settings, empty at first."""

    def __init__(self, settings: Bloom) -> None:
        self.bits_per_item, self.probes = design(settings.false_positive_rate)
        blocks = math.ceil(settings.expected_items * self.bits_per_item / BLOCK_BITS)
        # A block is chosen by 32 bits of the hash.
        assert blocks < 2**32, "a Bloom filter has less than 2^32 blocks"
        self._table = np.zeros(blocks * (BLOCK_BITS // 64), np.uint64)
        self.new = 0
        """Items that were new so far; more than `items` of the settings raise the rate."""

    @property
    def memory_bytes(self) -> int:
        """What it takes, from the first item to the last."""
        return int(self._table.nbytes)

    @property
    def false_positives(self) -> float:
        """The rate after what has been seen so far: the chance that the next new item is taken for a repeat."""
        return rate(self._table.size * 64 / max(self.new, 1), self.probes)

    def insert(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Whether each of the 64-bit hashes is new; it is known from then on. Later batches continue earlier ones."""
        new: npt.NDArray[np.bool_] = insert_new(hashes, self._table, self.probes)
        self.new += int(np.count_nonzero(new))
        return new


def design(false_positives: float) -> tuple[float, int]:
    """(bits an item, probes): the smallest filter of at most this rate."""
    best = (math.inf, 0)
    for probes in range(1, _MOST_PROBES + 1):
        low, high = 1.0, 400.0
        if rate(high, probes) > false_positives:
            continue
        while high - low > 0.01:
            middle = (low + high) / 2
            low, high = (low, middle) if rate(middle, probes) <= false_positives else (middle, high)
        best = min(best, (high, probes))
    return best


def rate(bits_per_item: float, probes: int) -> float:
    """Share of new items taken for repeats in a full filter.

    A block holds a Poisson number of items with mean BLOCK_BITS / bits_per_item; i items leave a bit of the block unset
    with (1 - 1/BLOCK_BITS)^(i probes), and all bits of the next item must be set (Putze et al. 2007, equation 3).
    """
    mean = BLOCK_BITS / bits_per_item
    items = np.arange(int(mean + 12 * math.sqrt(mean) + 30))
    logarithms = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, len(items))))])
    weights = np.exp(items * math.log(mean) - mean - logarithms)
    unset = (1 - 1 / BLOCK_BITS) ** (items * probes)
    return float((weights * (1 - unset) ** probes).sum())
