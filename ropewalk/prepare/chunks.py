"""Input files in chunks: what one worker takes at a time. Chunks depend on the inputs alone, not on who works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from .kernels.words import WORDS_ID
from .sources import InputFile, divided
from .stages import key_of
from .texts import Texts

READ_VERSION = "read-2"
MEASURE_VERSION = "measure-1"
"""Parts of the names of files: raise them when the same inputs give other bytes."""

CHUNK_BYTES = 4 << 20
"""Most input in one chunk; a larger file that cannot be divided is a chunk of its own."""

MOST_CHUNKS = 4000
"""A corpus that would have more has chunks of twice, four times, ... the size."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some input files or parts of files, and where the stages keep what they make of them."""

    index: int
    files: tuple[InputFile, ...]
    documents: Path
    """Every document that was read: texts, or the rule that removed it."""
    measured: Path
    """Statistics of every document."""
    corrected: Path | None
    """The layer of line-wise corrections, None when they are switched off."""

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(file.bytes for file in self.files)

    @property
    def texts(self) -> Texts:
        """The texts, corrected."""
        return Texts(self.documents, (self.corrected,) if self.corrected else ())


def divide(files: Sequence[InputFile], *, stages: Path, measuring: Any, correcting: Any) -> list[Chunk]:
    """`files` in order, in chunks.

    `measuring` and `correcting` (plain values; None for no corrections) are the settings that statistics and
    corrections depend on.
    """
    chunks = []
    for index, run in enumerate(_runs(list(divided(files)))):
        name = key_of(READ_VERSION, [file.identity() for file in run])
        corrected = None if correcting is None else key_of(MEASURE_VERSION, WORDS_ID, name, correcting)
        measured = key_of(MEASURE_VERSION, WORDS_ID, corrected or name, measuring)
        chunks.append(
            Chunk(
                index=index,
                files=tuple(run),
                documents=stages / "read" / f"{name}.arrow",
                measured=stages / "measure" / f"{measured}.arrow",
                corrected=stages / "correct" / f"{corrected}.arrow" if corrected else None,
            )
        )
    return chunks


def _runs(files: Sequence[InputFile]) -> Iterator[list[InputFile]]:
    """Runs of files that hold about half of the limit, at most the limit.

    A run ends after a file by a draw on the file's name, with a chance that grows with its size: a new file among
    many changes the run it falls into and leaves the others as they were.
    """
    limit = CHUNK_BYTES
    while limit * MOST_CHUNKS < sum(file.bytes for file in files):
        limit *= 2
    run: list[InputFile] = []
    room = limit
    for file in files:
        if run and file.bytes > room:
            yield run
            run, room = [], limit
        run.append(file)
        room -= file.bytes
        if xxhash.xxh3_64_intdigest(f"{file.name}:{file.part}".encode()) < 2**65 * file.bytes / limit:
            yield run
            run, room = [], limit
    if run:
        yield run
