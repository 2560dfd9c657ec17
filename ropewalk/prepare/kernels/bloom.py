"""Insert and ask, in the order of the items: the loop of a blocked Bloom filter."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from .words import Hashes

BLOCK_BITS = 512
"""One cache line: an item costs one access to memory, however many bits it sets."""
_WORDS = BLOCK_BITS // 64


@njit(cache=True, nogil=True)
def insert_new(hashes: Hashes, table: Hashes, probes: int) -> npt.NDArray[np.bool_]:
    """Whether each item is new to the filter, which then knows it; items are taken in order, equal ones among them
    too.
    """
    new = np.zeros(len(hashes), np.bool_)
    blocks = np.uint64(len(table) // _WORDS)
    for index in range(len(hashes)):
        # The high half chooses the block, a sequence from the whole hash the bits (SplitMix64): 9 bits of it a probe.
        state = hashes[index]
        first = (state >> np.uint64(32)) * blocks >> np.uint64(32)
        left = 0
        chosen = np.uint64(0)
        for _ in range(probes):
            if left == 0:
                state += np.uint64(0x9E3779B97F4A7C15)
                chosen = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
                chosen = (chosen ^ chosen >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
                chosen ^= chosen >> np.uint64(31)
                left = 7
            word = first * np.uint64(_WORDS) + (chosen >> np.uint64(6) & np.uint64(7))
            bit = np.uint64(1) << (chosen & np.uint64(63))
            new[index] |= table[word] & bit == 0
            table[word] |= bit
            chosen >>= np.uint64(9)
            left -= 1
    return new
