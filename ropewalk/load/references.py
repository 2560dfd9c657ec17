"""Tokens that lie in the files of another program, as one line. No torch.

Documents that follow each other in a file without a gap are one run, so that a corpus written as one long row of tokens
(Megatron-LM, litdata) is a run a file and can be mapped; samples with headers between them (MDS, tar archives) are a
run each and are copied together; what is packed is unpacked a unit at a time, the last few units kept.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.store.foreign.parquet import read_footer
from ropewalk.store.foreign.unpack import Bytes, unpacked
from ropewalk.store.items import Fetch, Item
from ropewalk.store.manifest import ShardEntry
from ropewalk.store.origin import Origin, is_url, local_path
from ropewalk.store.references import Catalogue, Unit, joined, read_references
from ropewalk.store.shards import Counts, Tokens, token_type

from .sources import Begins, Damage, Part, Sizes

Numbers = npt.NDArray[np.int64]
PIECE_BYTES = 1 << 20
"""Plain tokens behind a URL are fetched in pieces of this size, cut at the same places for every reader, so that caches
can keep them."""


class ReferencedTokens:
    """A source whose shards are references. `fetch` brings what is not mapped; unpacked units are kept up to
    `kept_bytes`."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        fetch: Fetch | None = None,
        kept_bytes: int = 256 << 20,
    ) -> None:
        self.catalogue = catalogue
        self._stored = np.dtype(catalogue.dtype).newbyteorder("<")
        self._dtype = np.dtype(token_type(catalogue.vocabulary))
        self._fetch = fetch or Origin()
        self._runs = _Runs(catalogue, self._stored.itemsize)
        self._maps = {unit.file: _map(unit) for unit in catalogue.units if _is_mapped(unit)}
        self._kept = _Kept(kept_bytes)
        self._unit_mapped = np.array([_is_mapped(unit) for unit in catalogue.units], np.bool_)
        self._unit_packed = np.array([unit.packing != "raw" for unit in catalogue.units], np.bool_)
        self._all_mapped = bool(self._unit_mapped.all())
        # What a piece is called never changes, and making its item takes as long as finding it.
        self._item = functools.lru_cache(maxsize=1 << 16)(self._make_item)
        self._footers: dict[str, Any] = {}

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.catalogue.length

    @property
    def damage(self) -> Sequence[Damage]:
        """None is known: other programs' files have no checksums."""
        return ()

    def mapped(self) -> Sequence[Part] | None:
        """A part for every run, when these are few and hold tokens as the gathering kernel reads them."""
        runs, width = self._runs, self._stored.itemsize
        # Integers wider than the vocabulary needs are narrowed, and checked for it, when they are read.
        plain = self._all_mapped and width in (2, 4) and width <= self._dtype.itemsize
        if not plain or len(runs.begin) > _MOST_PARTS or (runs.start % width).any():
            return None
        offsets = np.concatenate([[0], np.cumsum(self.catalogue.length)])
        parts = []
        for number, (first, last) in enumerate(itertools.pairwise(runs.document.tolist())):
            start, tokens = int(runs.start[number]), int(offsets[last] - offsets[first])
            held = self._maps[self.catalogue.units[runs.unit[number]].file][start : start + tokens * width]
            # Signed tokens are the same bits: none is negative.
            parts.append(Part(held.view(f"<u{width}"), offsets[first : last + 1] - offsets[first]))
        return parts

    def needs(self, begin: Begins, count: Sizes) -> list[Item]:
        if self._all_mapped:
            return []
        return [self._item(*key) for key in self._keys(*self._places(begin, count))]

    def read(self, begin: Begins, count: Sizes) -> Tokens:
        unit, first, last = self._places(begin, count)
        wanted = [key for key in self._keys(unit, first, last) if self._kept.get(key[0]) is None]
        fetched = dict(zip(wanted, self._fetch.fetch([self._item(*key) for key in wanted]), strict=True))
        self._unpack(fetched)
        places = list(zip(unit.tolist(), first.tolist(), last.tolist(), strict=True))
        raw = np.concatenate([np.zeros(0, np.uint8), *(self._bytes(place, fetched) for place in places)])
        tokens = raw.view(self._stored)
        self._check(tokens, file=self.catalogue.units[places[0][0]].file if places else "")
        return tokens.astype(self._dtype)

    def verify(self) -> None:
        """Reads all mapped tokens once; DataError when one is not in the vocabulary. Others are checked when read."""
        for number, part in enumerate(self.mapped() or ()):
            self._check(part.tokens, file=self.catalogue.units[self._runs.unit[number]].file)

    def counts(self, begin: Begins, count: Sizes) -> Counts | None:
        """All tokens count."""
        return None

    def _check(self, tokens: npt.NDArray[Any], *, file: str) -> None:
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.catalogue.vocabulary:
            wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            raise DataError(
                f"{file}: holds token {wrong}, the vocabulary has {self.catalogue.vocabulary}: the corpus was written "
                "with another tokenizer than `load.tokenizer`, or with another `dtype`"
            )

    def _places(self, begin: Begins, count: Sizes) -> tuple[Numbers, Numbers, Numbers]:
        """(unit, first byte, byte behind the last) of what makes up the ranges, in order."""
        runs, width = self._runs, self._stored.itemsize
        begin, end = begin[count > 0], (begin + count)[count > 0]
        low = np.searchsorted(runs.begin, begin, side="right") - 1
        several = np.searchsorted(runs.begin, end, side="left") - low
        which = np.repeat(np.arange(len(begin)), several)
        run = np.repeat(low - (np.cumsum(several) - several), several) + np.arange(len(which))
        begin, end = np.maximum(begin[which], runs.begin[run]), np.minimum(end[which], runs.end[run])
        # Empty documents can be runs of their own.
        run, begin, end = run[end > begin], begin[end > begin], end[end > begin]
        first = runs.start[run] + (begin - runs.begin[run]) * width
        return runs.unit[run].astype(np.int64), first, first + (end - begin) * width

    def _keys(self, unit: Numbers, first: Numbers, last: Numbers) -> list[tuple[int, int]]:
        """(unit, piece) of all that is fetched for some places, each once; a packed unit is one piece."""
        fetched = ~self._unit_mapped[unit]
        unit, first, last = unit[fetched], first[fetched], last[fetched]
        packed = self._unit_packed[unit]
        low = np.where(packed, 0, first // PIECE_BYTES)
        several = np.where(packed, 1, -(-last // PIECE_BYTES) - low)
        which = np.repeat(np.arange(len(unit)), several)
        piece = np.repeat(low - (np.cumsum(several) - several), several) + np.arange(len(which))
        return list(dict.fromkeys(zip(unit[which].tolist(), piece.tolist(), strict=True)))

    def _make_item(self, number: int, piece: int) -> Item:
        unit = self.catalogue.units[number]
        if unit.packing != "raw":
            return Item(unit.file, unit.start, unit.stop)
        return Item(unit.file, piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, unit.stop))

    def _unpack(self, fetched: dict[tuple[int, int], bytes | memoryview]) -> None:
        """Replaces the packed among `fetched` by what they hold, and keeps it."""
        for (number, place), data in list(fetched.items()):
            unit = self.catalogue.units[number]
            if unit.packing != "raw":
                footer = self._footer(unit) if unit.packing == "parquet" else None
                raw = unpacked(unit, data, dtype=self.catalogue.dtype, footer=footer)
                self._kept.keep(number, raw)
                fetched[number, place] = raw.data

    def _bytes(self, place: tuple[int, int, int], fetched: dict[tuple[int, int], bytes | memoryview]) -> Bytes:
        number, first, last = place
        unit = self.catalogue.units[number]
        if unit.packing == "raw" and unit.file in self._maps:
            return self._maps[unit.file][first:last]
        if unit.packing != "raw":
            held = fetched.get((number, 0))
            whole = self._kept.get(number) if held is None else np.frombuffer(held, np.uint8)
            if whole is None:
                # Another thread's unit took its room between the look and the use.
                return self._bytes(place, self._fetched_again(number))
            return whole[first:last]
        pieces = range(first // PIECE_BYTES, -(-last // PIECE_BYTES))
        parts = [np.frombuffer(fetched[number, n], np.uint8) for n in pieces]
        shift = pieces.start * PIECE_BYTES
        return np.concatenate([np.zeros(0, np.uint8), *parts])[first - shift : last - shift]

    def _fetched_again(self, number: int) -> dict[tuple[int, int], bytes | memoryview]:
        fetched = {(number, 0): self._fetch.fetch([self._item(number, 0)])[0]}
        self._unpack(fetched)
        return fetched

    def _footer(self, unit: Unit) -> Any:
        if unit.file not in self._footers:
            self._footers[unit.file] = read_footer(unit.file, unit.file_bytes, fetch=self._fetch)
        return self._footers[unit.file]


_MOST_PARTS = 4096
"""Runs beyond which mapping a part each costs more than copying: samples with headers have millions."""


def open_references(
    folder: Path,
    entries: Sequence[ShardEntry],
    *,
    verify: bool,
    fetch: Fetch | None = None,
    origin: Origin | None = None,
) -> ReferencedTokens:
    """The source of some shards of references; DataError when a file that they name has another size now, or with
    `verify` when a mapped token is not in the vocabulary."""
    catalogue = joined([read_references(folder / entry.file, checksum=entry.checksum) for entry in entries])
    origin = origin or Origin()
    for file, size in {unit.file: unit.file_bytes for unit in catalogue.units}.items():
        now = origin.size(file)
        if now != size:
            raise DataError(
                f"{file}: {now} bytes, {size} when the corpus was looked at; restore the file, or move {folder} away "
                "and run the same command again to train on it as it is now"
            )
    source = ReferencedTokens(catalogue, fetch=fetch)
    if verify:
        source.verify()
    return source


class _Runs:
    """Documents that lie without a gap, taken together."""

    def __init__(self, catalogue: Catalogue, width: int) -> None:
        ends = catalogue.start + catalogue.length * width
        same = (catalogue.unit[1:] == catalogue.unit[:-1]) & (catalogue.start[1:] == ends[:-1])
        first = np.flatnonzero(np.concatenate([[True], ~same])) if len(catalogue) else np.zeros(0, np.int64)
        offsets = np.concatenate([[0], np.cumsum(catalogue.length)])
        self.document = np.concatenate([first, [len(catalogue)]])
        """First document of each run, and the number of all."""
        self.begin = offsets[first]
        """First token of each run on the line."""
        self.start = catalogue.start[first]
        """Its place in the unit."""
        self.unit = catalogue.unit[first]
        self.end = np.append(self.begin[1:], offsets[-1]) if len(first) else self.begin
        """The token behind its last one."""


class _Kept:
    """Unpacked units, the least recently used dropped beyond a number of bytes. Safe for threads."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: OrderedDict[int, Bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, number: int) -> Bytes | None:
        with self._lock:
            if number in self._held:
                self._held.move_to_end(number)
            return self._held.get(number)

    def keep(self, number: int, data: Bytes) -> None:
        with self._lock:
            if number not in self._held:
                self._held[number] = data
                self._bytes += len(data)
            while self._bytes > self._most and len(self._held) > 1:
                self._bytes -= len(self._held.popitem(last=False)[1])


def _is_mapped(unit: Unit) -> bool:
    return unit.packing == "raw" and not is_url(unit.file)


def _map(unit: Unit) -> Bytes:
    if unit.file_bytes == 0:
        return np.zeros(0, np.uint8)
    return np.memmap(local_path(unit.file), dtype=np.uint8, mode="r")
