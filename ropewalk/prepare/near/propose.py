"""Which documents share a band key, over all chunks: the pairs that are worth comparing.

Keys are grouped band by band, and within a band range by range of keys when memory is short. Near-duplicates share many
bands, so most buckets hold the same documents as one of an earlier band; those say nothing new and are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..columns import Mask, Offsets, Rows
from ..kernels.buckets import equal_keys
from ..kernels.mix import mixed
from ..kernels.words import Hashes

_BYTES_A_KEY = 64
"""Peak while the keys of a band are grouped: keys and rows with their copies, and a table of twice to four times as
many."""


class Keys(Protocol):
    """The keys of a chunk: in memory (`Sketch`) or in a file (`StoredSketch`)."""

    @property
    def documents(self) -> int: ...

    def band(self, number: int) -> Hashes: ...


@dataclass(frozen=True, slots=True)
class Proposed:
    """Buckets of two or more documents. Documents are numbered over all chunks, in order."""

    members: Rows
    bounds: Offsets
    """Bucket i holds the documents `members[bounds[i] : bounds[i + 1]]`."""
    starts: Rows
    """Number of the first document of each chunk, and last the number of all documents."""

    @property
    def documents(self) -> Rows:
        """The documents in any bucket, ascending: those whose sets are needed."""
        return np.unique(self.members)

    def by_chunk(self) -> list[Rows]:
        """The same, as rows of each chunk."""
        documents = self.documents
        edges = np.searchsorted(documents, self.starts)
        return [documents[a:b] - start for a, b, start in zip(edges, edges[1:], self.starts, strict=False)]


def propose(chunks: Sequence[Keys], *, bands: int, memory_bytes: int) -> Proposed:
    """Buckets over all chunks. They depend neither on how documents are cut into chunks nor on the memory."""
    starts = np.cumsum([0, *(chunk.documents for chunk in chunks)])
    parts = max(1, -(-int(starts[-1]) * _BYTES_A_KEY // memory_bytes))
    seen = np.empty(0, np.uint64)
    members, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for band in range(bands):
        for part in range(parts):
            keys, rows = _keys(chunks, starts, band, part, parts)
            shared, counts = equal_keys(keys)
            rows = rows[shared]
            prints = _fingerprints(rows, counts)
            new = ~_within(prints, seen)
            seen = np.sort(np.concatenate([seen, prints[new]]))
            members.append(rows[np.repeat(new, counts)])
            sizes.append(counts[new])
    bounds = np.concatenate([[0], *sizes]).cumsum().astype(np.int64)
    return Proposed(np.concatenate(members), bounds, starts)


def _keys(chunks: Sequence[Keys], starts: Rows, band: int, part: int, parts: int) -> tuple[Hashes, Rows]:
    """(keys, documents) of a band whose keys lie in range `part` of `parts`; documents without a key are left out."""
    keys, rows = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for chunk, start in zip(chunks, starts[:-1], strict=True):
        column = chunk.band(band)
        inside = column != 0
        if parts > 1:
            inside &= (column >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32) == part
        found = np.flatnonzero(inside)
        keys.append(column[found])
        rows.append(found + start)
    return np.concatenate(keys), np.concatenate(rows)


def _within(values: Hashes, seen: Hashes) -> Mask:
    """Which of `values` are in the sorted `seen`."""
    if not len(seen):
        return np.zeros(len(values), bool)
    return np.asarray(seen[np.minimum(np.searchsorted(seen, values), len(seen) - 1)] == values)


def _fingerprints(rows: Rows, sizes: Rows) -> Hashes:
    """A number for each bucket that depends on its documents alone: two different ones meet with a chance of 2^-64."""
    if not len(sizes):
        return np.empty(0, np.uint64)
    # Documents are counted from 0, which stays 0 when it is mixed.
    return np.add.reduceat(mixed(rows.astype(np.uint64) + np.uint64(1)), np.cumsum(sizes) - sizes)
