"""Which held-out documents are measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ropewalk.base.errors import DataError
from ropewalk.base.seeds import seed_for
from ropewalk.store.manifest import Manifest, SourceEntry
from ropewalk.store.shards import Shard

from .text import Detokenizer


@dataclass(frozen=True, slots=True)
class Document:
    """One held-out document."""

    source: str
    domain: str
    tokens: np.ndarray
    """As in the shard: the last one is the end of text."""
    data: bytes
    """The text that the other tokens stand for."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    shard: Shard
    index: int
    size: int


def held_out_documents(
    folder: Path, manifest: Manifest, detokenizer: Detokenizer, *, max_bytes: int, seed: int
) -> list[Document]:
    """Whole validation documents of at most `max_bytes` bytes together, each source with its share of the bytes.

    Documents are taken in an order drawn from (seed, document id), which does not depend on how shards are cut; one
    that no longer fits into its source's share is passed over, so very long documents are rarer here than in the split.
    Where none fits, the shortest is taken.
    """
    candidates = {source.name: _candidates(folder, manifest, source, detokenizer) for source in manifest.sources}
    sizes = {name: sum(c.size for c in found) for name, found in candidates.items()}
    total = sum(sizes.values())
    share = min(1.0, max_bytes / max(1, total))
    chosen = [
        _document(source, candidate, detokenizer)
        for source in manifest.sources
        for candidate in _fitting(_shuffled(candidates[source.name], seed), int(sizes[source.name] * share))
    ]
    # A corpus of few long documents: the shortest one is over the limit, and better than none after hours of training.
    return chosen or [_shortest(folder, manifest, candidates, detokenizer)]


def _candidates(folder: Path, manifest: Manifest, source: SourceEntry, detokenizer: Detokenizer) -> list[_Candidate]:
    found = []
    for entry in manifest.shards_of("validation", source.name):
        shard = Shard(folder / entry.file, checksum=entry.checksum)
        shard.verify()
        sizes = detokenizer.document_bytes(shard, entry).tolist()
        found += [_Candidate(shard, index, size) for index, size in enumerate(sizes)]
    return found


def _shuffled(candidates: list[_Candidate], seed: int) -> list[_Candidate]:
    return sorted(candidates, key=lambda c: seed_for(seed, "held-out", int(c.shard.ids[c.index])))


def _fitting(candidates: Iterable[_Candidate], budget: int) -> Iterator[_Candidate]:
    for candidate in candidates:
        if candidate.size <= budget:
            budget -= candidate.size
            yield candidate


def _shortest(
    folder: Path, manifest: Manifest, candidates: dict[str, list[_Candidate]], detokenizer: Detokenizer
) -> Document:
    found = [(c.size, source.name, c, source) for source in manifest.sources for c in candidates[source.name]]
    if not found:
        raise DataError(f"{folder}: there is no validation document; raise `prepare.validation_share`")
    _, _, candidate, source = min(found, key=lambda item: item[:2])
    return _document(source, candidate, detokenizer)


def _document(source: SourceEntry, candidate: _Candidate, detokenizer: Detokenizer) -> Document:
    tokens = np.array(candidate.shard.document(candidate.index), np.int64)
    return Document(source.name, source.domain or source.name, tokens, detokenizer.data(tokens[:-1]))
