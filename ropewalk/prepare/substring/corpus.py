"""The texts of all documents as one mapped file: every later step reads any byte of it, and none holds it in memory."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ropewalk.base.errors import DamagedFile, DataError
from ropewalk.base.files import NO_FILE, PARTIAL
from ropewalk.store import sealed

from ..columns import Bytes, Offsets, Rows, text_buffers
from ..config import Substring
from ..kernels.repeats import PLACE_BITS
from ..kernels.windows import BYTES, WORDS, Classes
from ..kernels.words import characters

_TEXT, _BOUNDS = "text.bin", "bounds.bin"
WORK = "work"
_FOLDERS = ("samples", "copies")
_log = logging.getLogger(__name__)
_UNITS = {"bytes": BYTES, "words": WORDS}


@dataclass(frozen=True, slots=True)
class Corpus:
    """Document i is `text[bounds[i] : bounds[i + 1]]`; what counts as a window is decided too."""

    text: Bytes
    bounds: Offsets
    length: int
    unit: int
    classes: Classes

    @property
    def reach(self) -> int:
        """Bytes that every window has at least. A word and what parts it from the next are two; where nothing parts
        them, one is a letter of an unspaced script, which has three."""
        return self.length if self.unit == BYTES else 2 * self.length - 1

    def regions(self, size: int) -> list[tuple[int, int]]:
        """The text in stretches of `size` bytes, regardless of documents."""
        return [(begin, min(begin + size, len(self.text))) for begin in range(0, len(self.text), size)]


def gather(texts: Iterable[pa.LargeStringArray], *, folder: Path) -> None:
    """Writes `texts` to `folder`, unless they are there."""
    if (folder / _BOUNDS).exists() and (folder / _TEXT).exists():
        return
    sizes = [np.zeros(1, np.int64)]
    with sealed_file(folder / _TEXT) as file:
        for text in texts:
            data, offsets = text_buffers(text)
            file.write(data[offsets[0] : offsets[-1]])
            sizes.append(np.diff(offsets))
        if file.tell() >> PLACE_BITS:
            raise DataError(
                f"{file.tell()} bytes of text are more than substring takes (1.1 TB); prepare them in parts"
            )
    with sealed_file(folder / _BOUNDS) as file:
        file.write(np.cumsum(np.concatenate(sizes)))


@contextlib.contextmanager
def sealed_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file that is committed with its checksum when the block ends."""
    with sealed.sealed_file(path, seal_name(path), mode) as file:
        yield file


def seal_name(path: Path) -> str:
    """What the checksum of a file is bound to: its path from the folder that is named after the texts."""
    parts = path.parts
    top = parts.index(WORK) if WORK in parts[-4:] else len(parts) - 1
    return "/".join(parts[top - 1 :])


def sweep(work: Path) -> None:
    """Deletes what an earlier attempt left in `work`, unless every file in it is what was written.

    DamagedFile for a folder or a pipe in place of a file: we did not make it.
    """
    for path in sorted(work.rglob("*")) if work.is_dir() else ():
        if (path.is_dir() and path.name in _FOLDERS) or path.name.endswith(PARTIAL):
            continue
        try:
            sealed.verify(path, seal_name(path))
        except DamagedFile as error:
            if NO_FILE in str(error):
                raise
            _log.warning("%s; the repeated spans are looked for from the beginning", error)
            shutil.rmtree(work)
            return


def open_corpus(folder: Path, settings: Substring) -> Corpus:
    """What `gather` wrote, mapped."""
    bounds = read_array(folder / _BOUNDS, np.int64)
    return Corpus(
        read_array(folder / _TEXT, np.uint8), bounds, settings.length, _UNITS[settings.unit], characters().classes
    )


def read_texts(paths: Sequence[Path], *, column: str = "text") -> Iterator[pa.LargeStringArray]:
    """The text columns of committed Parquet parts, in order, a row group at a time."""
    for path in paths:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield from file.read_row_group(group, columns=[column])[column].cast(pa.large_string()).chunks


def read_array(path: Path, kind: npt.DTypeLike) -> npt.NDArray[Any]:
    """The numbers in a file, mapped: they are read when they are used, and never changed."""
    size = sealed.content_bytes(path)
    if size == 0:
        empty = np.zeros(0, kind)
        empty.flags.writeable = False
        return empty
    return np.asarray(np.memmap(path, kind, mode="r", shape=(size // np.dtype(kind).itemsize,)))


def read_rows(path: Path, *, columns: int) -> Rows:
    """The rows of a file, mapped."""
    return read_array(path, np.int64).reshape(-1, columns)
