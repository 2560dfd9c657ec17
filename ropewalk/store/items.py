"""The unit in which bytes are fetched, checked and kept: an item, and what fetches it.

An origin, a cache tier and a peer all are a `Fetch`; a tier is made around the next one, so that what a tier lacks
comes from behind it. Items that belong together are asked for together: an origin joins neighbours into one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from ropewalk.base.errors import DataError


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes `start` to `stop` (exclusive) of a file: a chunk of tokens, an image."""

    file: str
    """Local path or URL."""
    start: int
    stop: int
    checksum: int | None = None
    """xxh3-64 of the bytes, where the writer gave it."""
    name: str = ""
    """What people know it by: a document's id; empty for a chunk."""

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> int:
        """64 bits that name the item on every node and in every job."""
        return xxhash.xxh3_64_intdigest(f"{self.file}\0{self.start}\0{self.stop}".encode())

    def checked(self, data: bytes | memoryview) -> bytes | memoryview:
        """`data` when it is what was written; raises DataError that names the file, the range and the document."""
        where = f"{self.file}: bytes {self.start} to {self.stop}" + (f" (document {self.name})" if self.name else "")
        if len(data) != len(self):
            raise DataError(f"{where}: {len(data)} bytes came instead of {len(self)}; the file is shorter or changed")
        if self.checksum is not None and xxhash.xxh3_64_intdigest(data) != self.checksum:
            raise DataError(f"{where}: not what was written; restore the file from a copy or prepare it again")
        return data


class Fetch(Protocol):
    """Where items come from. Safe to call from several threads."""

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        """The bytes of each item in the order asked, checked; an error names the item that could not be had."""
        ...

    def close(self) -> None:
        """Lets go of threads, files and connections."""
        ...
