"""Training or validation, for every document that is left, or for parts of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ropewalk.base.errors import DataError

from ..columns import Bytes, Mask, Rows, text_buffers
from ..deduplicate import first_equals
from ..documents import Edits
from ..draw import kin
from ..fates import Fates
from ..holdout import BOTH, FEW, TRAIN, VALIDATION, Parts, Texts, Units, cut, draw
from ..texts import read_chosen
from .rules import STAGE as FILTER
from .state import State

STAGE, RULE = "holdout", "gap"
MOST_TIMES = 1.8
"""Shares beyond this multiple of what was asked for are reduced: twice is too much, and less need not be to be had."""


@dataclass(frozen=True, slots=True)
class Division:
    """What is held out of the documents that are left."""

    left: Rows
    """Their rows in the corpus."""
    first: Rows
    """For each, the place among them of the first that must be on the same side."""
    units: Units
    split: npt.NDArray[np.object_]
    """`train`, `validation`, or `both` for a document of which blocks are held out."""
    held: Rows
    """For each, how many units of it are held out: blocks, or 1 for the whole document."""
    parts: Parts
    """Those of documents that are in both; rows of the corpus."""

    def items(self) -> tuple[Rows, Mask]:
        """(row in the corpus, whether it is held out) of all that becomes one document of a shard, in order."""
        counts = np.where(self.split == BOTH, np.bincount(self.parts.rows, minlength=self._rows)[self.left], 1)
        held = np.repeat(self.split == VALIDATION, counts)
        held[np.repeat(self.split == BOTH, counts)] = self.parts.held
        return np.repeat(self.left, counts), held

    def column(self, documents: int) -> pa.StringArray:
        """The split of every document of the corpus, null for those that are not left."""
        names = np.full(documents, None, object)
        names[self.left] = self.split
        return pa.array(names, pa.string())

    def trained_bytes(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Bytes of each document of the corpus that are trained on."""
        trained = np.zeros(len(sizes), np.int64)
        whole = self.left[self.split == TRAIN]
        trained[whole] = sizes[whole]
        mine = self.parts.chosen(~self.parts.held)
        np.add.at(trained, mine.rows, mine.stops - mine.starts)
        return trained

    @property
    def _rows(self) -> int:
        return int(self.left[-1]) + 1


def split(state: State, *, seed: int) -> Division:
    """What is held out; DataError when too few documents are left."""
    corpus, fates = state.corpus, state.fates
    if not fates.left.any():
        raise _nothing_left(fates)
    left = np.flatnonzero(fates.left)
    rows = pa.array(left)
    hashes = corpus.hashes.take(rows)
    related = kin(corpus.ids.take(rows), hashes)
    texts = Texts(fates.source[left], fates.sizes[left], hashes, related, ~state.uncut[left])
    units = draw(texts, share=state.settings.validation_share, seed=seed)
    return _divided(state, left, first_equals(related), units)


def reduced(state: State, division: Division, lengths: Rows) -> Division | None:
    """The division with less held out of sources whose share of tokens came out nearly twice what was asked for; what
    was trained on still is. None when no source has too much, or less is not to be had.

    `lengths` are the tokens of `division.items()`.
    """
    share, units = state.settings.validation_share, division.units
    for source, (held, tokens) in enumerate(_tokens(state, division, lengths)):
        if held > MOST_TIMES * share * tokens and (units.held & (units.source == source)).sum() > 1:
            units = units.fewer(source, times=share * tokens / held)
    return None if units is division.units else _divided(state, division.left, division.first, units)


def close(state: State, division: Division, lengths: Rows) -> None:
    """Counts the text that is in neither split, and warns of shares that are far from what was asked for, or of few
    documents."""
    parts, sizes = division.parts, state.fates.sizes.copy()
    if len(parts):
        rows = np.unique(parts.rows)
        sizes[rows] = 0
        np.add.at(sizes, parts.rows, parts.stops - parts.starts)
        gaps = Edits.of(rows, RULE, state.fates.sizes[rows] - sizes[rows])
        state.fates.close(STAGE, edits=[gaps], sizes=sizes)
    for line in _warnings(state, division, lengths):
        state.warn(line)


def _warnings(state: State, division: Division, lengths: Rows) -> Iterator[str]:
    share, sources = state.settings.validation_share, state.settings.sources
    found = _tokens(state, division, lengths)
    for source, (held, tokens) in zip(sources, found, strict=True):
        if tokens and abs(held / tokens - share) >= share / 2:
            yield (
                f'source "{source.name}": {held / tokens:.1%} of its tokens are held out, {share:.1%} were asked for; '
                "add documents or change `prepare.validation_share`"
            )
    domains: dict[str, int] = {}
    for number, source in enumerate(sources):
        domain = source.domain or source.name
        mine = state.fates.source[division.left] == number
        if mine.any():
            domains[domain] = domains.get(domain, 0) + int(division.held[mine].sum())
    count = sum(domains.values())
    if count < FEW:
        what = "document or block is" if count == 1 else "documents or blocks of documents are"
        yield (
            f"only {count} {what} held out, {sum(held for held, _ in found):,} tokens: the validation loss depends on "
            "which; add documents or raise `prepare.validation_share`"
        )
    for domain, documents in domains.items():
        if documents < 2 and len(domains) > 1:
            yield (
                f'{"only one document" if documents else "no document"} of domain "{domain}" is held out: '
                "what is measured of this domain says little; add documents or raise `prepare.validation_share`"
            )


def _tokens(state: State, division: Division, lengths: Rows) -> list[tuple[int, int]]:
    """(tokens held out, all tokens) of each source."""
    rows, is_held = division.items()
    source, count = state.fates.source[rows], len(state.settings.sources)
    held = np.bincount(source, lengths * is_held, count).astype(np.int64)
    return list(zip(held.tolist(), np.bincount(source, lengths, count).astype(np.int64).tolist(), strict=True))


def _divided(state: State, left: Rows, first: Rows, units: Units) -> Division:
    held = np.bincount(units.first, units.held, len(left)).astype(np.int64)[first]
    blocks = np.bincount(units.first, minlength=len(left))[first]
    names = np.where(held == 0, TRAIN, np.where(held == blocks, VALIDATION, BOTH)).astype(object)
    parts = [Parts.none()]
    mask = np.zeros(len(state.corpus), bool)
    mask[left[names == BOTH]] = True
    for place, data in zip(np.flatnonzero(names == BOTH).tolist(), _read(state, mask), strict=True):
        mine = units.of(first[place])
        starts, stops, is_held = cut(data, units.block[mine[units.held[mine]]], blocks=len(mine))
        parts.append(Parts(np.full(len(starts), left[place]), starts, stops, is_held))
    columns = (np.concatenate(column) for column in zip(*map(_columns, parts), strict=True))
    return Division(left, first, units, names, held, Parts(*columns))


def _columns(parts: Parts) -> tuple[Rows, Rows, Rows, Mask]:
    return parts.rows, parts.starts, parts.stops, parts.held


def _read(state: State, chosen: Mask) -> Iterator[Bytes]:
    """The texts of the chosen documents, one after the other."""
    for texts, mask, _ in state.chunks(chosen):
        if mask.any():
            for column in read_chosen(texts, mask):
                data, offsets = text_buffers(column)
                for start, stop in zip(offsets.tolist(), offsets[1:].tolist(), strict=False):
                    yield data[start:stop]


def _nothing_left(fates: Fates) -> DataError:
    rules = fates.rules()
    if not rules:
        return DataError("the sources hold no document at all; check `prepare.sources`")
    listing = ", ".join(f"`{rule}` {documents}" for _, rule, documents in rules)
    stage, worst, _ = rules[0]
    remedy = (
        f"relax `prepare.filter.{worst}`" if stage == FILTER else "check that the sources hold text in their `format`"
    )
    return DataError(f"no document is left of {len(fates)}: removed by rule: {listing}; {remedy}")
