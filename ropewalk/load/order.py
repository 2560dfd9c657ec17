"""The order of the data as a function: row i of a phase is computed from (seed, sources, mixture, i). No I/O, no rank,
no torch.

The mixture says which source gives row i and the how many-eth of its rows that is. A source's rows are read in epochs,
each in the order of a permutation of its own, computed an index at a time. A row is a window of the source's line of
tokens, or the pieces of documents that a layout puts together. So resuming is remembering one integer, any number of
ranks can read any part of the same order, and which rows read a document can be asked.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.base.seeds import seed_for

from .config import Packing, Shuffle
from .history import History
from .layout import Layout, laid_out
from .mixture import Course, Mixture
from .packing import BLOCK_DOCUMENTS, count_pieces, fill_pieces
from .permutation import place_rows, places

BLOCK_TOKENS = 1 << 22
"""Tokens of a block of windows when blocks are shuffled: 8 MiB of uint16. A block ends one token into the piece behind
it and need not begin with a piece of 1 MiB, so a store is read for up to 10 pieces of which 8 are used; for a block of
one piece it would be 3."""

GROUP_TOKENS = 1 << 25
"""Tokens of the blocks whose rows are read among each other: 64 MiB of uint16 to hold, some ten thousand rows mixed."""


@dataclass(frozen=True, slots=True)
class SourceData:
    """What the order must know of a source."""

    name: str
    lengths: npt.NDArray[np.int64]
    """Tokens of each document, in the order of the source's line."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The pieces of some rows, as arrays ready for a kernel; `starts`, `length` and `targets` are read-only."""

    starts: npt.NDArray[np.int64]
    """Pieces of row r are starts[r] to starts[r + 1]."""
    source: npt.NDArray[np.int32]
    """Of each piece: the number of its source."""
    begin: npt.NDArray[np.int64]
    """Its first token, on the source's line."""
    length: npt.NDArray[np.int32]
    """Its inputs."""
    targets: npt.NDArray[np.int32]
    """Its targets: as many as inputs, or one less when its document ends with it."""

    def __len__(self) -> int:
        return len(self.starts) - 1


class Order:
    """The rows of a phase in their global order, the same on every rank.

    `windows` cuts each source's line every `sequence_length` tokens; what remains at its end is `unread`. `best-fit`
    lays whole documents into rows; the layout is kept in the folder `layouts` when one is given and may be written.
    """

    def __init__(
        self,
        sources: Sequence[SourceData],
        *,
        sequence_length: int,
        seed: int,
        packing: Packing = "windows",
        shuffle: Shuffle = "all",
        mixture: Mixture,
        layouts: Path | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self.names = [source.name for source in sources]
        self._seed, self._packing, self._shuffle = seed, packing, shuffle
        self._sources = list(sources)
        self._tokens = [int(source.lengths.sum()) for source in sources]
        self._layouts: list[Layout] = []
        if packing == "best-fit":
            self._layouts = [self._laid_out(source, layouts) for source in sources]
            rows = [layout.rows for layout in self._layouts]
        else:
            # A window needs one token more than a row: the target of its last input.
            rows = [max(0, tokens - 1) // sequence_length for tokens in self._tokens]
        self.source_rows = dict(zip(self.names, rows, strict=True))
        """Rows of an epoch of each source."""
        _check(self.source_rows, sequence_length)
        # Rows, rows of a block and blocks of a group: the form in which the kernel wants them.
        blocks = [self._block_rows(source, count) for source, count in zip(sources, rows, strict=True)]
        groups = [max(2, GROUP_TOKENS // max(1, block * sequence_length)) for block in blocks]
        self._sizes = np.array([rows, blocks, groups], np.int64)
        self._keys = np.array([seed_for(seed, "order", name) for name in self.names], np.uint64)
        self.mixture = mixture
        self._course = Course(mixture, self.source_rows)
        # Windows have one piece a row; batches come in few sizes.
        self._whole = functools.lru_cache(maxsize=4)(self._whole_rows)
        self._offsets = functools.lru_cache(maxsize=None)(self._compute_offsets)

    @property
    def total(self) -> int | None:
        """Rows there are until every source has had its epochs; None when there is no end."""
        return self._course.total

    @property
    def fill(self) -> list[float]:
        """The share of each source's places that hold a token; the remainder is padding."""
        if self._packing == "windows":
            return [1.0] * len(self.names)
        places = [rows * self.sequence_length for rows in self.source_rows.values()]
        return [tokens / room for tokens, room in zip(self._tokens, places, strict=True)]

    @property
    def unread(self) -> list[int]:
        """Tokens at the end of each source's line that no row reads as an input."""
        if self._packing == "best-fit":
            return [0] * len(self.names)
        return [t - r * self.sequence_length for t, r in zip(self._tokens, self.source_rows.values(), strict=True)]

    def rows(self, first: int, count: int, *, stride: int = 1) -> Rows:
        """The pieces of `count` rows: `first`, `first + stride`, ..."""
        source, begin = self._placed(first, count, stride, self.sequence_length if not self._layouts else 1)
        if self._layouts:
            return self._pieces(source, begin)
        starts, whole = self._whole(count)
        return Rows(starts, source, begin, whole, whole)

    def rows_of_sources(self, source: npt.NDArray[np.int32], number: npt.NDArray[np.int64]) -> Rows:
        """The pieces of rows by the number of their source and their own within it, in no order of ours."""
        if self._layouts:
            return self._pieces(source, number)
        starts, whole = self._whole(len(source))
        return Rows(starts, source, number * self.sequence_length, whole, whole)

    def counts(self, rows: int) -> list[int]:
        """How many of the first `rows` rows each source gives."""
        return self._course.counts(rows)

    def epochs(self, rows: int) -> list[float]:
        """How often each source has been read after `rows` rows."""
        return [count / size for count, size in zip(self.counts(rows), self.source_rows.values(), strict=True)]

    def reads_of(self, source: str, document: int, *, rows: int) -> list[int]:
        """Which of the first `rows` rows hold a token of the document, as an input or as a target."""
        number = self.names.index(source)
        size, block, together = (int(value) for value in self._sizes[:, number])
        held = self._rows_holding(number, document)
        given = self._course.counts(rows)[number]
        found = []
        for epoch in range(-(-given // size)):
            key = int(self._keys[number])
            for place in places(held, size, block=block, together=together, key=key, epoch=epoch).tolist():
                row = self._course.row_of(number, epoch * size + place)
                if row is not None and row < rows:
                    found.append(row)
        return sorted(found)

    def steps_of(self, source: str, document: int, *, history: History) -> list[int]:
        """The steps of `history` that read a token of the document."""
        steps = map(history.step_of, self.reads_of(source, document, rows=history.row))
        return sorted({step for step in steps if step is not None})

    def identity(self) -> dict[str, Any]:
        """What must be the same for a row number to mean the same row; JSON. The mixture is told apart by itself."""
        return {
            "seed": self._seed,
            "packing": self._packing,
            "shuffle": self._shuffle,
            "sequence_length": self.sequence_length,
            "sources": {
                source.name: {"documents": len(source.lengths), "tokens": tokens}
                for source, tokens in zip(self._sources, self._tokens, strict=True)
            },
        }

    def check_identity(self, saved: Mapping[str, Any]) -> None:
        """DataError names what differs from a saved identity. Sources may be added; none may go or change."""
        now = self.identity()
        before = [(key, value, now.get(key)) for key, value in saved.items() if key != "sources"]
        before += [(f"source {name}", size, now["sources"].get(name)) for name, size in saved["sources"].items()]
        differences = [
            f"{key} was {old}, now is {'absent' if new is None else new}" for key, old, new in before if old != new
        ]
        if differences:
            raise DataError(
                f"the rows read so far are not rows of this order: {'; '.join(differences)}; set it back, or begin "
                "a new run or phase"
            )

    def _placed(
        self, first: int, count: int, stride: int, scale: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """The source of each row, and its number within the source times `scale`."""
        if self.total is not None and count and first + (count - 1) * stride >= self.total:
            raise DataError(
                f"row {first + (count - 1) * stride} is asked for, but the sources have only {self.total} rows until "
                "each has had its `max_epochs`; raise those, train fewer steps or add documents"
            )
        source, number = np.empty(count, np.int32), np.empty(count, np.int64)
        done = 0
        while done < count:
            row = first + done * stride
            stretch = self._course.at(row)
            rest = count - done
            here = rest if stretch.stop is None else min(rest, -(-(stretch.stop - row) // stride))
            place_rows(
                *(row - stretch.first, stride, scale, stretch.cycle, stretch.counts, self._sizes, self._keys),
                *(source[done : done + here], number[done : done + here]),
            )
            done += here
        return source, number

    def _whole_rows(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        starts, whole = np.arange(count + 1), np.full(count, self.sequence_length, np.int32)
        starts.flags.writeable = whole.flags.writeable = False
        return starts, whole

    def _pieces(self, source: npt.NDArray[np.int32], number: npt.NDArray[np.int64]) -> Rows:
        starts = np.zeros(len(source) + 1, np.int64)
        present = np.flatnonzero(np.bincount(source)).tolist()
        for one in present:
            count_pieces(one, source, number, self._layouts[one].starts, starts)
        np.cumsum(starts, out=starts)
        size = int(starts[-1])
        rows = Rows(
            starts,
            source=np.empty(size, np.int32),
            begin=np.empty(size, np.int64),
            length=np.empty(size, np.int32),
            targets=np.empty(size, np.int32),
        )
        for one in present:
            layout = self._layouts[one]
            fill_pieces(
                *(one, source, number, layout.starts, layout.pieces),
                *(rows.starts, rows.source, rows.begin, rows.length, rows.targets),
            )
        # As those of windows are: a kernel that takes rows is compiled once for both.
        for column in (rows.starts, rows.length, rows.targets):
            column.flags.writeable = False
        return rows

    def _laid_out(self, source: SourceData, folder: Path | None) -> Layout:
        # Rows of neighbours stay together only if documents do.
        key = seed_for(self._seed, "documents", source.name) if self._shuffle == "all" else None
        return laid_out(source.lengths, length=self.sequence_length, key=key, folder=folder, name=source.name)

    def _block_rows(self, source: SourceData, rows: int) -> int:
        """Rows of a block that is shuffled as a whole, 0 when rows are shuffled one by one."""
        if self._shuffle == "all":
            return 0
        if self._packing == "windows":
            return max(1, BLOCK_TOKENS // self.sequence_length)
        # As many as are laid out together: each of them reads from all over its documents.
        return max(1, rows * BLOCK_DOCUMENTS // len(source.lengths))

    def _compute_offsets(self, number: int) -> npt.NDArray[np.int64]:
        """Where a source's documents begin and the last one ends; only who asks for documents pays for it."""
        return np.concatenate([[0], np.cumsum(self._sources[number].lengths)])

    def _rows_holding(self, number: int, document: int) -> npt.NDArray[np.int64]:
        """The rows of a source that hold a token of the document."""
        offsets = self._offsets(number)
        if not 0 <= document < len(offsets) - 1:
            raise IndexError(f"{self.names[number]} has {len(offsets) - 1} documents; there is no number {document}")
        begin, end = int(offsets[document]), int(offsets[document + 1])
        if self._layouts:
            return self._layouts[number].rows_holding(document, begin, end)
        if begin == end:
            return np.zeros(0, np.int64)
        # Window w reads the tokens w * S to w * S + S, the last one as a target only.
        first = max(0, begin - 1) // self.sequence_length
        last = min((end - 1) // self.sequence_length, int(self._sizes[0, number]) - 1)
        return np.arange(first, last + 1)


def _check(rows: Mapping[str, int], length: int) -> None:
    """Raises DataError unless every source has a row."""
    short = [name for name, count in rows.items() if count < 1]
    if short:
        raise DataError(
            f"too few training tokens for one row of {length}: {', '.join(short)}; shorten `load.sequence_length`, "
            "add documents or drop the source"
        )
