"""Shards that hold no tokens but say where they lie: in the files of another program, which stay as they are.

    aligned 64    int64 lengths[documents], tokens of each document
    aligned 64    int64 starts[documents], byte of its first token: in the file, or in its unit when that is unpacked
    aligned 64    int32 units[documents], number of its unit
    footer        JSON: the frame's (`frame.py`), dtype of the tokens where they lie, the units

A unit is what has to be read together: a whole file of plain tokens, of which any range can be had, or a stretch that
is unpacked first (a Zstandard frame, a column of a Parquet row group).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ropewalk.base.files import committed_file

from .frame import FrameWriter, damaged, local_frame
from .shards import Written

Packing = Literal["raw", "zstd", "gzip", "tar-json", "parquet"]
INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
"""Types in which tokens are found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A stretch of a file with tokens in it."""

    file: str
    """Absolute path or URL."""
    start: int = 0
    stop: int
    """Bytes of the file that the unit takes."""
    file_bytes: int
    """Size of the whole file when it was looked at: another one means that the file has changed."""
    packing: Packing = "raw"
    """What the bytes are: tokens as they are, or packed."""
    column: str = ""
    """Column or key of the tokens, where the packing has some."""
    group: int = 0
    """Row group of a Parquet file."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What a corpus holds and where it lies; documents in the order of the corpus."""

    dtype: str
    """Of the tokens, unpacked; little-endian."""
    units: tuple[Unit, ...]
    unit: npt.NDArray[np.int32]
    """Number of each document's unit."""
    start: npt.NDArray[np.int64]
    """Byte of its first token: in the file for plain tokens, else in the unpacked unit."""
    length: npt.NDArray[np.int64]
    """Its tokens."""
    vocabulary: int = 1 << 32
    """Every token is below it."""

    def __len__(self) -> int:
        return len(self.length)

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.length.sum())

    def part(self, first: int, stop: int) -> Catalogue:
        """Documents `first` to `stop` (exclusive), with the units they need."""
        used, unit = np.unique(self.unit[first:stop], return_inverse=True)
        return Catalogue(
            self.dtype,
            tuple(self.units[number] for number in used.tolist()),
            unit.astype(np.int32),
            self.start[first:stop],
            self.length[first:stop],
            self.vocabulary,
        )


def joined(catalogues: list[Catalogue]) -> Catalogue:
    """Catalogues of one dtype, one after the other."""
    shifts = np.cumsum([0, *(len(catalogue.units) for catalogue in catalogues)])
    return Catalogue(
        catalogues[0].dtype,
        tuple(unit for catalogue in catalogues for unit in catalogue.units),
        np.concatenate([c.unit + shift for c, shift in zip(catalogues, shifts, strict=False)]).astype(np.int32),
        np.concatenate([c.start for c in catalogues]).astype(np.int64),
        np.concatenate([c.length for c in catalogues]).astype(np.int64),
        catalogues[0].vocabulary,
    )


def write_references(path: Path, catalogue: Catalogue) -> Written:
    """Commits a shard of references."""
    with committed_file(path) as file:
        writer = FrameWriter(file)
        writer.section("lengths", catalogue.length.astype("<i8"))
        writer.section("starts", catalogue.start.astype("<i8"))
        writer.section("units", catalogue.unit.astype("<i4"))
        checksum = writer.finish(
            kind="references",
            dtype=catalogue.dtype,
            documents=len(catalogue),
            tokens=catalogue.tokens,
            vocabulary=catalogue.vocabulary,
            compression="off",
            units=[dataclasses.asdict(unit) for unit in catalogue.units],
        )
        size = file.tell()
    return Written(documents=len(catalogue), tokens=catalogue.tokens, bytes=size, checksum=checksum)


def read_references(path: Path, *, checksum: str | None = None) -> Catalogue:
    """The catalogue in a shard of references, every byte of it checked."""
    frame = local_frame(path, kinds=("references",))
    frame.expect(checksum)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for number in frame.damaged_chunks(data):
        item = frame.chunk(number)
        raise damaged(str(path), f"bytes {item.start} to {item.stop} are not what was written")

    def section(name: str, dtype: str) -> npt.NDArray[Any]:
        place = frame.section(name)
        assert place is not None, "references have these three sections"
        return data[slice(*place)].view(dtype)

    return Catalogue(
        frame.footer["dtype"],
        tuple(Unit(**unit) for unit in frame.footer["units"]),
        section("units", "<i4"),
        section("starts", "<i8"),
        section("lengths", "<i8"),
        frame.footer["vocabulary"],
    )
