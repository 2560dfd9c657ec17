"""SimHash fingerprints: 64 bits that differ in few places for documents that share most shingles (Charikar 2002)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from ..columns import Bytes, Offsets
from .shingles import shingle_document
from .words import Hashes


@njit(cache=True, nogil=True)
def simhash_fingerprints(
    data: Bytes,
    offsets: Offsets,
    classes: npt.NDArray[np.uint16],
    folds: npt.NDArray[np.uint32],
    ring: Hashes,
    room: int,
) -> Hashes:
    """One fingerprint a document: bit b is the majority of bit b over its shingles, repeats counted, a tie is 0."""
    documents = len(offsets) - 1
    fingerprints = np.zeros(documents, np.uint64)
    shingles = np.empty(room, np.uint64)
    votes = np.empty(64, np.uint64)
    places = np.arange(64).astype(np.uint64)
    for document in range(documents):
        found = shingle_document(data, offsets[document], offsets[document + 1], classes, folds, ring, shingles)
        votes[:] = 0
        for shingle in shingles[:found]:
            for bit in range(64):
                votes[bit] += shingle >> places[bit] & np.uint64(1)
        for bit in range(64):
            if 2 * np.int64(votes[bit]) > found:
                fingerprints[document] |= np.uint64(1) << places[bit]
    return fingerprints
