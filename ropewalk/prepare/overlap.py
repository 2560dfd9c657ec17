"""Which n-grams of some texts, such as the questions of a benchmark, stand in the training split of a prepared corpus.

One pass over the shards, without an index: what is kept in memory is the n-grams of the texts. Case makes no
difference, punctuation neither; a letter of a script without spaces is a word (`kernels/words.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Progress, Silent
from ropewalk.store.manifest import ShardEntry, Split, read_manifest
from ropewalk.store.shards import Shard

from .kernels.overlap import mark_ngrams, ngram_hashes
from .ngrams import SHARD_SHIFT, document_blocks
from .spelling import Speller, Words, words_of
from .trace import Origin, Tracer

Values = npt.NDArray[np.uint64]
NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Overlap:
    """What of one text stands in the corpus."""

    ngrams: int
    """N-grams of the text; 0 if it has fewer words than one n-gram."""
    found: int
    """How many of them stand in the corpus."""
    span: str
    """The first one that does, as the text spells it; empty if none does."""
    origin: Origin | None
    """The first document that holds it."""


def overlaps_with(
    folder: Path,
    texts: Sequence[str],
    lengths: Sequence[int],
    *,
    split: Split = "train",
    progress: Progress | None = None,
) -> list[Overlap]:
    """What of each text stands in the corpus prepared in `folder`; `lengths` are the words of its n-grams.

    UserError if the tokenizer is not byte-level, or the tokens lie in files of another program.
    """
    progress, manifest = progress or Silent(), read_manifest(folder)
    shards = manifest.shards_of(split)
    if any(entry.kind != "tokens" for entry in shards):
        raise UserError(f"{folder}: its tokens lie in files of another program, whose documents cannot be searched")
    words = [words_of(text) for text in texts]
    hashes = [ngram_hashes(each.hashes, length) for each, length in zip(words, lengths, strict=True)]
    tables = {
        length: _Table([each for each, its in zip(hashes, lengths, strict=True) if its == length], length)
        for length in {*lengths}
    }
    speller, done = Speller(folder / manifest.tokenizer.file), 0
    progress.begin("search text", sum(entry.tokens for entry in shards), "tokens")
    for number, entry in enumerate(shards):
        shard = Shard(folder / entry.file, checksum=entry.checksum)
        shard.verify()
        for first, last in document_blocks(shard):
            offsets = np.asarray(shard.offsets[first : last + 1])
            spelled = speller.words(shard.tokens[offsets[0] : offsets[-1]], offsets - offsets[0])
            for table in tables.values():
                table.mark(spelled, (number << SHARD_SHIFT) + int(offsets[0]))
            done += int(offsets[-1] - offsets[0])
            progress.advance(done)
    progress.end()
    tracer = Tracer(folder)
    return [
        _overlap(each, found, tables[length], shards, tracer)
        for each, found, length in zip(words, hashes, lengths, strict=True)
    ]


class _Table:
    """The n-grams of one length that are looked for, and the first place at which each was found."""

    def __init__(self, hashes: Sequence[Values], length: int) -> None:
        self.length = length
        self._wanted = np.unique(np.concatenate([np.zeros(0, np.uint64), *hashes]))
        self._places = np.full(len(self._wanted), NOWHERE, np.int64)
        # A bit table of 16 bits per n-gram answers for most n-grams of the corpus, which stand in no text.
        bits = max(10, (16 * len(self._wanted)).bit_length())
        self._present = np.zeros(1 << bits, bool)
        self._present[self._wanted & np.uint64((1 << bits) - 1)] = True

    def mark(self, spelled: Words, base: int) -> None:
        """Looks at the words of some documents, whose first token is token `base`."""
        found = np.full(len(self._wanted), NOWHERE, np.int64)
        mark_ngrams(spelled.hashes, spelled.firsts, self.length, self._wanted, self._present, found)
        new = np.flatnonzero((found != NOWHERE) & (self._places == NOWHERE))
        self._places[new] = base + spelled.tokens(found[new])

    def places(self, hashes: Values) -> npt.NDArray[np.int64]:
        """Where each of these n-grams stands first, or NOWHERE."""
        return self._places[np.searchsorted(self._wanted, hashes)]


def _overlap(words: Words, hashes: Values, table: _Table, shards: Sequence[ShardEntry], tracer: Tracer) -> Overlap:
    places = table.places(hashes)
    hits = np.flatnonzero(places != NOWHERE)
    if not len(hits):
        return Overlap(len(hashes), 0, "", None)
    first = int(hits[0])
    start, stop = words.starts[first], words.stops[first + table.length - 1]
    shard, token = divmod(int(places[first]), 1 << SHARD_SHIFT)
    span = words.text[start:stop].tobytes().decode(errors="replace")
    return Overlap(len(hashes), len(hits), span, tracer.trace(shards[shard].file, token))
