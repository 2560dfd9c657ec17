"""Questions to an index of n-grams: where does this span of tokens or words stand?"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.seal import damaged, warn_unsealed
from ropewalk.store.manifest import read_manifest
from ropewalk.store.sealed import checksum_of

from .kernels import ngrams as kernel
from .kernels.words import WORDS_ID
from .ngrams import KINDS, SHARD_SHIFT, part_length, read_index
from .spelling import Speller, Words, words_of
from .trace import Origin, Tracer

Values = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A place at which a span stands."""

    origin: Origin
    start: int
    stop: int
    """Its tokens in the shard; the first and the last may hold more than the span."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """An n-gram of a text that stands in the corpus."""

    first: int
    """Its first word or token in the text, counted from 0."""
    occurrences: tuple[Occurrence, ...]


class NgramIndex:
    """The index in a folder below prepared data, opened for questions."""

    def __init__(self, path: Path) -> None:
        self._path, self.folder = path, path.parent
        tree = read_index(path)
        self.unit, self.length = tree["unit"], int(tree["length"])
        known = [kernel.NGRAMS_ID, *([WORDS_ID] if self.unit == "words" else [])]
        if tree["algorithm"] != known:
            raise DataError(
                f"{path}: made by {tree['algorithm']}, this ropewalk asks by {known}; move it away and make it again"
            )
        self._shards = [shard["file"] for shard in tree["shards"]]
        self._counts, self._checksums = tree["entries"], tree["checksums"]
        self._tracer = Tracer(self.folder)
        manifest = read_manifest(self.folder)
        self._entries = {entry.file: entry for entry in manifest.shards}
        self._speller = Speller(self.folder / manifest.tokenizer.file) if self.unit == "words" else None
        self._document_words = functools.lru_cache(maxsize=64)(self._read_words)
        self._opened = functools.lru_cache(maxsize=None)(self._open)

    def find(self, span: str | Sequence[int], *, most: int = 1000) -> list[Occurrence]:
        """The places, `most` at most, at which the whole span stands: its words, or its tokens one by one.

        UserError when it is shorter than the n-grams of the index.
        """
        question = self._question(span)
        units = len(question.values)
        if units < self.length:
            raise UserError(f"{units} {self.unit}: n-grams of {self.length} are indexed; ask for at least as many")
        return list(self._places(question, 0, units, most))

    def overlaps(self, text: str | Sequence[int], *, most: int = 10) -> list[Overlap]:
        """Every n-gram of the text that stands in the corpus, each with `most` places at most."""
        question = self._question(text)
        found = []
        for first in range(len(question.values) - self.length + 1):
            places = tuple(self._places(question, first, first + self.length, most))
            if places:
                found.append(Overlap(first, places))
        return found

    def verified(self) -> int:
        """Entries of the index, every one of which was read; DamagedFile when they are not what was written."""
        return sum(len(self._opened(number)[0]) for number in range(len(self._counts)) if self._counts[number])

    def _question(self, span: str | Sequence[int]) -> _Question:
        if isinstance(span, str):
            if self.unit != "words":
                raise UserError(f"{self._path}: this index is of tokens; give token ids, not a text")
            words = words_of(span)
            return _Question(words.hashes, words)
        if self.unit != "tokens":
            raise UserError(f"{self._path}: this index is of words; give a text, not token ids")
        return _Question(np.array(span, np.uint64), None)

    def _places(self, question: _Question, first: int, last: int, most: int) -> Iterator[Occurrence]:
        """Places of the units `first` to `last` of the question; every one is compared."""
        values, part = question.values[first:last], part_length(self.length)
        window = np.array([0]), np.array([self.length])
        hashes, chosen = kernel.choose_parts(values[: self.length], *window, self.length, part)
        found = 0
        for place in self._candidates(int(hashes[0])):
            file, token = self._shards[int(place) >> SHARD_SHIFT], int(place) & (1 << SHARD_SHIFT) - 1
            origin = self._origin(file, token)
            verify = self._verified_tokens if question.words is None else self._verified_words
            for start, stop in verify(question, first, last, int(chosen[0]), origin, token):
                yield Occurrence(origin, start, stop)
                found += 1
                if found == most:
                    return

    def _candidates(self, hashed: int) -> Values:
        bits = (len(self._counts) - 1).bit_length()
        number = hashed >> 64 - bits if bits else 0
        if not self._counts[number]:
            return np.zeros(0, np.uint64)
        hashes, places = self._opened(number)
        start, stop = (np.searchsorted(hashes, np.uint64(hashed), side=side) for side in ("left", "right"))
        return np.array(places[start:stop])

    def _open(self, number: int) -> tuple[Values, Values]:
        """(hashes, places) of a range, mapped, all of it checked; DamagedFile when it is not what was written."""
        files = [self._path / f"{number:05d}.{kind}" for kind in KINDS]
        for kind, path in zip(KINDS, files, strict=True):
            what = "part of an index of n-grams"
            if self._checksums is None:
                warn_unsealed(self._path, what)
            elif checksum_of(path) != self._checksums[number][kind]:
                remedy = f"delete {self._path} and run `ropewalk prepare` again, which makes it anew"
                raise damaged(path, what=what, remedy=remedy)
        hashes, places = (np.memmap(path, "<u8", "r") for path in files)
        return hashes, places

    def _origin(self, file: str, token: int) -> Origin:
        offsets = self._tracer.shard(file).offsets
        return self._tracer.origin(self._entries[file], int(np.searchsorted(offsets, token, side="right")) - 1)

    def _verified_tokens(
        self, question: _Question, first: int, last: int, chosen: int, origin: Origin, token: int
    ) -> Iterator[tuple[int, int]]:
        start = token - chosen
        stop = start + last - first
        if origin.start <= start and stop < origin.stop:
            tokens = self._tracer.shard(origin.shard).tokens[start:stop]
            if np.array_equal(tokens.astype(np.uint64), question.values[first:last]):
                yield start, stop

    def _verified_words(
        self, question: _Question, first: int, last: int, chosen: int, origin: Origin, token: int
    ) -> Iterator[tuple[int, int]]:
        assert question.words is not None
        words = self._document_words(origin.shard, origin.document)
        for word in np.flatnonzero(words.tokens() == token - origin.start).tolist():
            start = word - chosen
            stop = start + last - first
            inside = start >= 0 and stop <= len(words.hashes)
            if inside and words.spelled(start, stop) == question.words.spelled(first, last):
                yield origin.start + int(words.tokens(start)), origin.start + int(words.last_tokens(stop - 1)) + 1

    def _read_words(self, file: str, document: int) -> Words:
        assert self._speller is not None
        tokens = self._tracer.shard(file).document(document)
        return self._speller.words(tokens, np.array([0, len(tokens)]))


@dataclass(frozen=True, slots=True)
class _Question:
    values: Values
    words: Words | None
    """As a text has them, for an index of words."""
