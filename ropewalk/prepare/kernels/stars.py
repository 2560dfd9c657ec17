"""Which documents of shared buckets are near-duplicates of one that stays: verified pair by pair, star by star.

A bucket holds documents that share a band key: a proposal, no more. Documents are taken in canonical order, best first.
Each meets the centres of its buckets, the documents before it that stayed, and goes when it resembles one of them by
itself; otherwise it becomes a centre. So whatever goes has a partner that stays and that it resembles, a chain of small
changes removes nothing but the direct neighbours of what stays, and no two documents that were compared and resemble
each other both stay.

A bucket of a thousand copies has one centre, and its documents are compared once each. Only a bucket of documents that
are unlike each other (common boilerplate) has many; a document meets the first `most` of them. A pair that shares
several buckets is compared once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Offsets, Rows
from .words import Hashes

_STRIDE = 64
"""Steps of an intersection between two looks at whether it can still reach the threshold."""


@njit(cache=True, nogil=True)
def stars(
    fixed: int,
    buckets: Rows,
    bounds: Offsets,
    sizes: Rows,
    values: Hashes,
    begins: Rows,
    ends: Rows,
    bits: bool,
    threshold: float,
    most: int,
) -> tuple[Rows, npt.NDArray[np.float64], int]:
    """(centre, similarity, comparisons): for each document the one it goes for, itself when it stays.

    Documents are numbered from best to last; the first `fixed` stay whatever they resemble. Document d lies in
    `buckets[bounds[d] : bounds[d + 1]]` and has the sorted set `values[begins[d] : ends[d]]`, or with `bits` the
    fingerprint in these words. `sizes` counts the documents of each bucket.
    """
    documents = len(begins)
    centre = np.arange(documents)
    similarity = np.ones(documents)
    # The centres of bucket b are centres[starts[b] : starts[b] + held[b]].
    starts = np.zeros(len(sizes) + 1, np.int64)
    for bucket in range(len(sizes)):
        starts[bucket + 1] = starts[bucket] + min(sizes[bucket], most)
    centres = np.empty(starts[-1], np.int64)
    held = np.zeros(len(sizes), np.int64)
    met = np.full(documents, -1, np.int64)
    compared = 0
    for document in range(documents):
        begin, end = begins[document], ends[document]
        best = 0.0
        if document >= fixed:
            for bucket in buckets[bounds[document] : bounds[document + 1]]:
                for other in centres[starts[bucket] : starts[bucket] + held[bucket]]:
                    if met[other] == document:
                        continue
                    met[other] = document
                    compared += 1
                    if bits:
                        alike = _agreement(values, begin, end, begins[other])
                    else:
                        alike = _jaccard(values, begin, end, begins[other], ends[other], threshold)
                    # The closest centre; of equally close ones the better document, in whatever bucket it is met.
                    if alike > best or (alike == best and other < centre[document]):
                        best = alike
                        centre[document] = other
        if best >= threshold:
            similarity[document] = best
        else:
            centre[document] = document
            for bucket in buckets[bounds[document] : bounds[document + 1]]:
                if held[bucket] < most:
                    centres[starts[bucket] + held[bucket]] = document
                    held[bucket] += 1
    return centre, similarity, compared


@njit(cache=True, nogil=True)
def _agreement(values: Hashes, begin: int, end: int, other: int) -> float:
    """Share of equal bits. A Hamming distance of k is an agreement of exactly 1 - k / bits, a power of two."""
    differing = np.uint64(0)
    for word in range(end - begin):
        differing += _ones(values[begin + word] ^ values[other + word])
    return 1.0 - np.float64(differing) / (64.0 * np.float64(end - begin))


@njit(cache=True, nogil=True)
def _ones(word: np.uint64) -> np.uint64:
    """Number of bits set: sums of neighbours two, four and eight bits wide, then all bytes (one instruction for
    LLVM).
    """
    word -= word >> np.uint64(1) & np.uint64(0x5555555555555555)
    word = (word & np.uint64(0x3333333333333333)) + (word >> np.uint64(2) & np.uint64(0x3333333333333333))
    word = word + (word >> np.uint64(4)) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return word * np.uint64(0x0101010101010101) >> np.uint64(56)


@njit(cache=True, nogil=True)
def _jaccard(values: Hashes, begin: int, end: int, other_begin: int, other_end: int, threshold: float) -> float:
    """Jaccard similarity of two sorted sets; 0 as soon as it cannot reach the threshold."""
    total = end - begin + other_end - other_begin
    # J = common / (total - common) >= t  <=>  common >= total * t / (1 + t); one less for the rounding.
    least = total * threshold / (1.0 + threshold) - 1.0
    common = 0
    i, j = np.uint64(begin), np.uint64(other_begin)
    while True:
        left = min(end - int(i), other_end - int(j))
        if left == 0:
            return common / (total - common) if common else 0.0
        if common + left < least:
            return 0.0
        for _ in range(min(left, _STRIDE)):
            one, two = values[i], values[j]
            common += one == two
            i += np.uint64(one <= two)
            j += np.uint64(two <= one)
