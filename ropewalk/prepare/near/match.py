"""Proposed pairs -> near-duplicates that go, each with the document that stays for it and their similarity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..columns import Rows
from ..config import Near
from ..kernels.stars import stars
from .files import joined
from .propose import Proposed
from .sketch import Sets


@dataclass(frozen=True, slots=True)
class Matches:
    """Documents that go, ascending; all numbers are of documents over all chunks."""

    document: Rows
    partner: Rows
    """The document that stays for it."""
    similarity: npt.NDArray[np.float64]
    """Jaccard similarity with the partner; with `simhash` the share of equal bits."""
    compared: int = 0
    """Pairs whose similarity was measured."""


def canonical_ranks(*columns: npt.NDArray[np.generic]) -> Rows:
    """The rank of each document, 0 for the best: lowest in the first column, then in the next, then the first to come.

    `canonical_ranks(priority, -size)` prefers the source of highest priority, then the longest text.
    """
    order = np.lexsort(columns[::-1])
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks


def match(
    proposed: Proposed, sets: Sequence[Sets], ranks: Rows, near: Near, *, fixed: int = 0, scratch: Path | None = None
) -> Matches:
    """Takes documents from best to last; each goes when it is close enough to one that stayed before it.

    `sets` are those of `proposed.by_chunk()`, chunk by chunk; `ranks` are of all documents. The first `fixed`
    documents stay, and count as better than all others. Sets that do not fit into memory lie in folder `scratch`.
    """
    documents = proposed.documents
    everything = joined(sets, memory_bytes=near.memory_bytes, scratch=scratch)
    assert len(everything.bounds) == len(documents) + 1, "there is one set for each proposed document"
    rank = np.where(documents < fixed, documents - fixed, ranks[documents])
    order = np.argsort(rank)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))

    sizes = np.diff(proposed.bounds)
    members = number[np.searchsorted(documents, proposed.members)]
    by_member = np.argsort(members, kind="stable")
    buckets = np.repeat(np.arange(len(sizes)), sizes)[by_member]
    bounds = np.concatenate([[0], np.bincount(members, minlength=len(documents))]).cumsum().astype(np.int64)

    bits = near.kind == "simhash"
    threshold = 1 - near.max_distance / near.fingerprint_bits if bits else near.threshold
    centre, similarity, compared = stars(
        int(np.count_nonzero(documents < fixed)),
        buckets,
        bounds,
        sizes,
        everything.values,
        everything.bounds[:-1][order],
        everything.bounds[1:][order],
        bits,
        threshold,
        near.max_compared,
    )
    gone = np.flatnonzero(centre != np.arange(len(centre)))
    gone = gone[np.argsort(documents[order[gone]])]
    return Matches(documents[order[gone]], documents[order[centre[gone]]], similarity[gone], compared)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A source that would have lost more than `max_removed_share` of its documents."""

    source: str
    documents: int
    matched: int
    """Near-duplicates found."""
    removed: int
    """Those that go; the others stay."""

    def __str__(self) -> str:
        return (
            f"source `{self.source}`: {self.matched:,} of {self.documents:,} documents are near-duplicates; only "
            f"{self.removed:,} were removed. Look at samples, then raise `deduplicate.near.max_removed_share` or the "
            "threshold"
        )


def capped(
    matches: Matches, sources: npt.NDArray[np.integer], names: Sequence[str], *, max_removed_share: float
) -> tuple[Matches, list[Alarm]]:
    """Spares the least similar documents of sources that would lose too many, and tells which sources those are.

    `sources` holds the number (in `names`) of each document's source. A document that is spared has no partner any
    more; partners are documents that stay in any case, so nothing else changes.
    """
    totals = np.bincount(sources, minlength=len(names))
    mine = sources[matches.document]
    goes = np.ones(len(mine), bool)
    alarms = []
    for source, total in enumerate(map(int, totals)):
        found = np.flatnonzero(mine == source)
        limit = int(total * max_removed_share)
        if len(found) > limit:
            closest_first = found[np.lexsort((matches.document[found], -matches.similarity[found]))]
            goes[closest_first[limit:]] = False
            alarms.append(Alarm(names[source], total, len(found), limit))
    kept = Matches(matches.document[goes], matches.partner[goes], matches.similarity[goes], matches.compared)
    return kept, alarms
