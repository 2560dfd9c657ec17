"""Samples of text such that two equal stretches of `reach` bytes always share one: minimizers.

Each stretch of `reach` bytes is represented by one of the runs of `size` bytes in it, that of the least hash (the last
of equals). The choice depends on the bytes of the stretch alone, so equal stretches choose equal runs (winnowing,
Schleimer et al. 2003; minimizers, Roberts et al. 2004). Consecutive stretches mostly share theirs: a new one is chosen
every (reach - size) / 2 bytes on average. A stretch whose run occurs once in the corpus is not repeated. That leaves
one number to count for 50 bytes of text, where a suffix array has one for each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Offsets

Hashes = npt.NDArray[np.uint64]

BASE = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MOST = np.uint64(0xFFFFFFFFFFFFFFFF)


def byte_values() -> Hashes:
    """One odd 64-bit number for each value of a byte: splitmix64 of it (Steele et al. 2014)."""
    return np.array([int(mix(np.uint64((byte + 1) * int(BASE) % (1 << 64)))) | 1 for byte in range(256)], np.uint64)


def leaving_values(values: Hashes, *, size: int) -> Hashes:
    """What each byte counts in a rolling hash when it is left `size` bytes behind."""
    power = pow(int(BASE), size, 1 << 64)
    return np.array([int(value) * power % (1 << 64) for value in values], np.uint64)


@njit(cache=True, nogil=True)
def mix(value: np.uint64) -> np.uint64:
    """The finisher of splitmix64: every bit of the result depends on every bit of `value`."""
    value = (value ^ value >> np.uint64(30)) * _FIRST
    value = (value ^ value >> np.uint64(27)) * _SECOND
    return value ^ value >> np.uint64(31)


@njit(cache=True, nogil=True)
def sample(
    text: Bytes,
    bounds: Offsets,
    begin: int,
    end: int,
    reach: int,
    size: int,
    values: Hashes,
    leaving: Hashes,
    starts: npt.NDArray[np.uint32],
    keys: Hashes,
) -> int:
    """Samples the stretches that start in `text[begin:end]` and lie inside one document; returns their number.

    Sample i has the key `keys[i]` and stands for the stretches from `begin + starts[i]` up to the next sample, or to
    the end of the document. Both arrays have a place for each byte.
    """
    choices = reach - size + 1
    ring = np.empty(choices, np.uint64)
    count = 0
    document = np.searchsorted(bounds, begin, side="right") - 1
    while document + 1 < len(bounds) and bounds[document] < end:
        first = max(bounds[document], begin)
        last = min(bounds[document + 1] - reach, end - 1)
        document += 1
        if first > last:
            continue
        rolled = np.uint64(0)
        for at in range(first, first + size):
            rolled = rolled * BASE + values[text[at]]
        chosen, stands, slot = -1, -1, 0
        least = _MOST
        for at in range(first, last + choices):
            value = (rolled ^ rolled >> np.uint64(32)) * _FIRST
            value ^= value >> np.uint64(29)
            ring[slot] = value
            if value <= least:
                least, chosen = value, at
            elif chosen <= at - choices:
                # The least has left the stretch: look for the last least of those that are in it.
                least, place = value, slot
                chosen = at
                for back in range(1, choices):
                    place = place - 1 if place else choices - 1
                    if ring[place] < least:
                        least, chosen = ring[place], at - back
            slot = slot + 1 if slot + 1 < choices else 0
            if at - first >= choices - 1 and chosen != stands:
                stands = chosen
                starts[count] = at - choices + 1 - begin
                keys[count] = mix(least)  # the least of many is small; mixed again, all its bits are even
                count += 1
            if at + size < last + reach:
                rolled = rolled * BASE + values[text[at + size]] - leaving[text[at]]
    return count
