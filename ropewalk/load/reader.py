"""Rows of the order -> rows in memory: gathered from what is mapped, fetched where it has to be read. No torch."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.store.items import Item
from ropewalk.store.shards import Tokens

from .gather import Lines, RowForm, gather
from .order import Rows
from .sources import Part, TokenSource


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading some rows gave besides the rows."""

    filled: npt.NDArray[np.int64]
    """Tokens of each row that are neither padding nor damaged."""
    fetched: float
    """When the last byte was there that had to be fetched, by the clock; the beginning when none had."""


class Reader:
    """Reads rows of `sources`; safe to call from several threads.

    `whole`: pieces of rows are documents or parts of them, else windows over several. Where a source knows its
    `damage`, or with `skip` where a range turns out to be damaged, the pieces that touch it hold token 0 and none of
    their targets counts; each damage is told once by `take_warnings`.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        form: RowForm,
        *,
        whole: bool,
        skip: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sources, self._form, self._whole, self._skip, self._clock = sources, form, whole, skip, clock
        self._parts = [source.mapped() for source in sources]
        self._lines = Lines.of([parts or () for parts in self._parts])
        self._read = [number for number, parts in enumerate(self._parts) if parts is None]
        # Where documents begin, for those lines that have no parts to say it.
        self._starts = {s: _cumulated(sources[s].lengths) for s in self._read if not whole}
        self._damage = [(number, each) for number, source in enumerate(sources) for each in source.damage]
        self._warnings = deque(_warning(damage.what) for _, damage in self._damage)
        self._broken: set[Item] = set()

    @property
    def fetches(self) -> bool:
        """Whether a source has to be fetched, not only gathered."""
        return bool(self._read)

    def read(self, rows: Rows, buffer: npt.NDArray[np.uint8]) -> Reading:
        """Writes `rows` into `buffer`, a row of memory each."""
        lines, bad, fetched = self._lines, self._damaged(rows), self._clock()
        place = rows
        if self._read:
            lines, place, unread = self._fetched(rows)
            bad, fetched = np.union1d(bad, unread), self._clock()
        gather(place, lines, self._form, whole=self._whole, buffer=buffer)
        length = rows.length.astype(np.int64)
        if len(bad):
            self._blank(buffer, rows, bad)
            length[bad] = 0
        before = _cumulated(length)
        return Reading(before[rows.starts[1:]] - before[rows.starts[:-1]], fetched)

    def take_warnings(self) -> list[str]:
        """What was found damaged since the last call."""
        return [self._warnings.popleft() for _ in range(len(self._warnings))]

    def _fetched(self, rows: Rows) -> tuple[Lines, Rows, npt.NDArray[np.int64]]:
        """(lines, the rows on these lines, pieces that could not be read): sources that are not mapped become a line of
        what the rows want of them, one range after the other."""
        parts, begin = [list(several or ()) for several in self._parts], rows.begin.copy()
        failed: list[int] = []
        for number in self._read:
            pieces = np.flatnonzero(rows.source == number)
            wanted, count = rows.begin[pieces], rows.targets[pieces] + 1
            tokens, counts, bad = self._fetch(self._sources[number], wanted, count)
            failed += pieces[bad].tolist()
            starts = np.cumsum(count) - count
            bits = None if counts is None else np.packbits(counts, bitorder="little")
            parts[number] = [Part(tokens, self._boundaries(number, wanted, count, starts), bits)]
            begin[pieces] = starts
        return Lines.of(parts), dataclasses.replace(rows, begin=begin), np.array(failed, np.int64)

    def _fetch(
        self, source: TokenSource, begin: npt.NDArray[np.int64], count: npt.NDArray[np.int32]
    ) -> tuple[Tokens, npt.NDArray[np.bool_] | None, list[int]]:
        """(tokens, whether they count, ranges that could not be read) of these ranges of a source."""
        if not self._skip:
            return source.read(begin, count), source.counts(begin, count), []
        if not self._broken:
            with contextlib.suppress(DataError):  # told below, piece by piece
                return source.read(begin, count), source.counts(begin, count), []
        tokens: list[npt.NDArray[np.uint32]] = []
        counts: list[npt.NDArray[np.bool_]] = []
        bad: list[int] = []
        for number in range(len(begin)):
            one = begin[number : number + 1], count[number : number + 1]
            if self._is_broken(source, *one):
                bad.append(number)
                tokens.append(np.zeros(count[number], np.uint32))
                counts.append(np.zeros(count[number], bool))
                continue
            tokens.append(source.read(*one).astype(np.uint32))
            counted = source.counts(*one)
            counts.append(np.ones(count[number], bool) if counted is None else counted)
        return np.concatenate(tokens).astype(self._form.dtype), np.concatenate(counts), bad

    def _boundaries(
        self, number: int, begin: npt.NDArray[np.int64], count: npt.NDArray[np.int32], starts: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Where documents begin on the line of fetched ranges, which stand at `starts`."""
        total = int(count.sum())
        if self._whole:
            return np.array([0, total], np.int64)
        known = self._starts[number]
        low, high = np.searchsorted(known, begin, side="right"), np.searchsorted(known, begin + count, side="left")
        inside = [known[a:b] - first + at for a, b, first, at in zip(low, high, begin, starts, strict=True)]
        # The beginning of a range counts as one: a row numbers its documents anew.
        return np.unique(np.concatenate([np.array([0, total], np.int64), starts, *inside]))

    def _damaged(self, rows: Rows) -> npt.NDArray[np.int64]:
        """The pieces that touch damage that is known."""
        bad = np.zeros(len(rows.begin), bool)
        for number, damage in self._damage:
            here = (rows.begin < damage.end) & (rows.begin + rows.targets >= damage.begin)
            bad |= here & (rows.source == number)
        return np.flatnonzero(bad)

    def _is_broken(self, source: TokenSource, begin: npt.NDArray[np.int64], count: npt.NDArray[np.int32]) -> bool:
        """Whether a range cannot be had. Items that cannot are found by halving, told and remembered: other rows meet
        them again, every epoch, and a store is asked several times before it is given up."""
        items = source.needs(begin, count)
        if not self._broken.isdisjoint(items):
            return True
        try:
            source.read(begin, count)
        except DataError as error:
            if len(items) == 1:
                self._broken.update(items)
                self._warnings.append(_warning(str(error)))
                return True
            half = count // 2
            parts = ((begin, half), (begin + half, count - half))
            # Both, not the first that is broken: each damage is told.
            return any([self._is_broken(source, *part) for part in parts])
        return False

    def _blank(self, buffer: npt.NDArray[np.uint8], rows: Rows, pieces: npt.NDArray[np.int64]) -> None:
        """Takes the tokens of these pieces away, and the targets among them."""
        form = self._form
        tokens = buffer[:, : form.token_bytes].view(form.dtype)
        after = form.token_bytes + form.bit_bytes
        for piece in pieces.tolist():
            row = int(np.searchsorted(rows.starts, piece, side="right")) - 1
            place = int(rows.length[rows.starts[row] : piece].sum())
            targets = int(rows.targets[piece])
            tokens[row, place : place + targets + 1] = 0
            bits = buffer[row, after : after + form.bit_bytes]
            counted = np.unpackbits(bits, bitorder="little")
            counted[place : place + targets] = 0
            bits[:] = np.packbits(counted, bitorder="little")


def _cumulated(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, and the sum up to each size."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _warning(damage: str) -> str:
    return f'{damage}; what touches them is read as nothing (`load.on_damage = "skip"`)'
