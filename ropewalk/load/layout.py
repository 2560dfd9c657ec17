"""Which pieces of documents each row of a packed source holds: a table made once, kept in a file and memory-mapped.

    payload    uint64 pieces, row after row (`packing.Packed`)
    starts     int64[rows + 1], pieces before each row
    blocks     int64[blocks + 1], rows before each block of documents

The table does not depend on the epoch, the rank or the batch, so that finding a row costs the same whatever is trained,
from any row on. It takes 9 to 11 bytes a document of 670 tokens, under one per cent of the tokens. Its file lies beside
the manifest under a name that says what it was made from; a damaged or missing one is made again, 0.2 us a document.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import DataError, StorageError
from ropewalk.base.files import committed_file, open_lock
from ropewalk.store.frame import FrameWriter, local_frame

from .packing import BEGIN_BITS, BLOCK_DOCUMENTS, LENGTH_BITS, Packed, Pieces, packed
from .permutation import unpermuted

FORMAT = 1
"""Raised whenever other rows come of the same documents; part of the file's name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The rows of one source; the arrays are read-only."""

    starts: npt.NDArray[np.int64]
    pieces: Pieces
    blocks: npt.NDArray[np.int64]
    documents: int
    key: int | None
    """Of the permutation in which the documents were taken; None: as they lie."""

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    def rows_holding(self, document: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The rows that hold pieces of a document, which lies at `begin` to `end` (exclusive) of the line."""
        place = document
        if self.key is not None:
            place = int(unpermuted(np.array([document]), self.documents, self.key)[0])
        first, behind = self.blocks[place // BLOCK_DOCUMENTS], self.blocks[place // BLOCK_DOCUMENTS + 1]
        starts = self.starts[first : behind + 1]
        begins = self.pieces[starts[0] : starts[-1]] >> np.uint64(LENGTH_BITS + 1)
        held = np.flatnonzero((begins >= begin) & (begins < end)) + starts[0]
        return np.searchsorted(starts, held, side="right") - 1 + first


def laid_out(lengths: npt.NDArray[np.int64], *, length: int, key: int | None, folder: Path | None, name: str) -> Layout:
    """The layout of a source's documents in rows of `length`, from `folder` when it is there, else made and kept.

    Where nothing can be written it is made in memory. Of several processes one makes it while the others wait.
    """
    tokens = int(lengths.sum())
    if length >= 1 << LENGTH_BITS or tokens >= 1 << BEGIN_BITS:
        raise DataError(
            f"{name}: {tokens} tokens in rows of {length} are too many to pack; rows have fewer than "
            f"{1 << LENGTH_BITS}, a source fewer than {1 << BEGIN_BITS}: divide it, or set `load.packing` to windows"
        )
    if folder is not None:
        path = folder / f"{_identity(lengths, length=length, key=key)}.bin"
        found = _opened(path, key=key)
        if found is not None:
            return found
        try:
            with _alone(folder):
                found = _opened(path, key=key)
                if found is None:
                    _log.info("%s: laying %d documents into rows of %d tokens", name, len(lengths), length)
                    _write(path, packed(lengths, length=length, key=key), documents=len(lengths), length=length)
                    found = _opened(path, key=key)
        except StorageError as error:
            _log.warning("%s: the layout of its rows is made in memory by every process: %s", name, error)
        if found is not None:
            return found
    return _gathered(packed(lengths, length=length, key=key), documents=len(lengths), key=key)


def _identity(lengths: npt.NDArray[np.int64], *, length: int, key: int | None) -> str:
    """A name for everything that decides the table."""
    digest = xxhash.xxh3_128(f"{FORMAT} {length} {key} {len(lengths)}\n".encode())
    digest.update(np.ascontiguousarray(lengths, "<i8").data)
    return digest.hexdigest()


def _opened(path: Path, *, key: int | None) -> Layout | None:
    """The layout in `path`, all of it checked; None when there is none or, with a warning, when it is damaged or is
    that of other documents."""
    if not path.exists():
        return None
    try:
        frame = local_frame(path, kinds=("layout",))
        data = np.asarray(np.memmap(path, np.uint8, mode="r"))
        whole = not any(True for _ in frame.damaged_chunks(data)) and frame.footer.get("key") == path.stem
    except DataError:
        whole = False
    if not whole:
        _log.warning("%s: this layout of rows is damaged, or not that of these documents; it is made again", path)
        return None
    pieces, starts, blocks = (data[slice(*frame.footer["sections"][part])] for part in ("pieces", "starts", "blocks"))
    return Layout(
        starts=starts.view("<i8"),
        pieces=pieces.view("<u8"),
        blocks=blocks.view("<i8"),
        documents=frame.footer["documents"],
        key=key,
    )


def _write(path: Path, groups: Iterable[Packed], *, documents: int, length: int) -> None:
    """Commits the table; memory: 4 bytes a row."""
    with committed_file(path) as file:
        frame = FrameWriter(file)
        sizes, blocks = [], []
        for group in groups:
            frame.write(group.pieces.astype("<u8", copy=False).data.cast("B"))
            sizes.append(group.sizes)
            blocks.append(group.blocks)
        frame.end_payload("pieces")
        frame.section("starts", _sums(sizes).astype("<i8", copy=False))
        frame.section("blocks", _sums(blocks).astype("<i8", copy=False))
        frame.finish(kind="layout", compression="off", documents=documents, sequence_length=length, key=path.stem)


def _gathered(groups: Iterable[Packed], *, documents: int, key: int | None) -> Layout:
    parts = list(groups)
    layout = Layout(
        starts=_sums([part.sizes for part in parts]),
        pieces=np.concatenate([np.zeros(0, np.uint64), *(part.pieces for part in parts)]),
        blocks=_sums([part.blocks for part in parts]),
        documents=documents,
        key=key,
    )
    # Read-only as a mapped file is: a kernel is compiled once for both.
    layout.starts.flags.writeable = layout.pieces.flags.writeable = False
    return layout


def _sums(parts: list[npt.NDArray[np.int32]] | list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """0 and the sums of the first 1, 2, ... numbers of all parts."""
    sums = np.zeros(sum(map(len, parts)) + 1, np.int64)
    if parts:
        np.cumsum(np.concatenate(parts), out=sums[1:])
    return sums


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Waits until no other process makes a layout in `folder`; the kernel frees it if we die."""
    with open_lock(folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
