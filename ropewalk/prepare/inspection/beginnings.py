"""The beginning of a file, unpacked: enough to tell what it holds, whatever its name says.

What is cut off or damaged is no error here: a beginning is whatever could be had. An archive gives the beginnings of
its first members.
"""

from __future__ import annotations

import dataclasses
import os
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, cast

from .. import remote
from ..config import Source
from ..formats import Kind, Packing, kind_of
from ..readers.item import Budget, Fault
from ..readers.streams import Readable, buffered, unpacked
from ..sources import open_location

MOST_MEMBERS = 3
"""Members of an archive that are looked at."""

_PACKED: tuple[tuple[bytes, Packing], ...] = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bz2"))
_MOST_UNPACKED = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The first bytes of a file, or of a member of an archive."""

    name: str
    """Of the file; `archive!member` of a member."""
    kind: Kind
    """How its source reads it, by its name."""
    data: bytes
    """Unpacked."""
    whole: bool
    """Whether that is all there is."""
    packed: Packing
    """How it is packed, by its first bytes, whatever its name says."""
    size: int | None
    """Bytes as it lies there; None where a store does not tell."""
    unpacked_size: int | None
    """About as many bytes it holds unpacked."""
    members: int = 1
    """Of the archive that it stands for, with all those that were not looked at."""


def beginnings(location: str, kind: Kind, source: Source, *, most: int) -> Iterator[Beginning]:
    """The beginning of the file, up to `most` bytes; of an archive, those of its first members that `source` reads.

    Raises OSError when the file cannot be opened.
    """
    if kind.reader == "zip" and not kind.packing and not remote.is_url(location) and zipfile.is_zipfile(location):
        members = list(_zip_members(location, source, most=most))
    elif kind.reader == "tar":
        members = list(_tar_members(location, kind, source, most=most))
    else:
        members = []
    if members:
        yield from members
    else:
        yield _beginning(location, kind, most=most)


def _beginning(location: str, kind: Kind, *, most: int) -> Beginning:
    size = _size(location)
    with open_location(location, seek=False) as stream:
        packed = _packing(stream.peek(4))
        data, whole = _taken(unpacked(stream, packed, budget=_budget()), most)
        # One that is read to its end may be closed.
        consumed = 0 if remote.is_url(location) else size if stream.closed else stream.tell()
    if whole:
        full: int | None = len(data)
    elif not packed:
        full = size
    else:
        full = _estimated(location, packed, size=size, consumed=consumed, unpacked_bytes=len(data))
    return Beginning(name=location, kind=kind, data=data, whole=whole, packed=packed, size=size, unpacked_size=full)


def _zip_members(location: str, source: Source, *, most: int) -> Iterator[Beginning]:
    with zipfile.ZipFile(location) as archive:
        files = [member for member in archive.infolist() if not member.is_dir() and not member.flag_bits & 1]
        named = [(member, kind_of(member.filename, source)) for member in files]
        read = [(member, kind) for member, kind in named if kind.reader and _is_shown(member.filename)]
        for member, kind in read[:MOST_MEMBERS]:
            try:
                with archive.open(member) as file:
                    found = _of_member(f"{location}!{member.filename}", kind, file, size=member.file_size, most=most)
                    yield dataclasses.replace(found, members=len(read))
            except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError):
                continue


def _tar_members(location: str, kind: Kind, source: Source, *, most: int) -> Iterator[Beginning]:
    """Read as a stream: how many members there are, nobody knows without reading all of it."""
    count = 0
    with open_location(location, seek=False) as stream:
        try:
            with tarfile.open(fileobj=unpacked(stream, kind.packing, budget=_budget()), mode="r|") as archive:
                for member in archive:
                    inner = kind_of(member.name, source)
                    if not member.isreg() or not inner.reader or not _is_shown(member.name):
                        continue
                    file = archive.extractfile(member)
                    assert file is not None, "a regular member can be read"
                    yield _of_member(f"{location}!{member.name}", inner, file, size=member.size, most=most)
                    count += 1
                    if count == MOST_MEMBERS:
                        return
        except (tarfile.TarError, Fault, ValueError, OverflowError, EOFError):
            return


def _of_member(name: str, kind: Kind, file: IO[bytes], *, size: int, most: int) -> Beginning:
    stream = buffered(cast(Readable, file), budget=_budget())
    packed = _packing(stream.peek(4))
    data, whole = _taken(unpacked(stream, packed, budget=_budget()), most)
    full = len(data) if whole else None if packed else size
    return Beginning(name=name, kind=kind, data=data, whole=whole, packed=packed, size=size, unpacked_size=full)


def _packing(head: bytes) -> Packing:
    return next((packing for mark, packing in _PACKED if head.startswith(mark)), "")


def _taken(stream: Readable, most: int) -> tuple[bytes, bool]:
    """The first `most` bytes, and whether the stream ends there; damage ends it too, and leaves it unfinished."""
    blocks: list[bytes] = []
    left = most
    try:
        while left > 0:
            block = stream.read1(left)
            if not block:
                return b"".join(blocks), True
            blocks.append(block)
            left -= len(block)
        return b"".join(blocks), not stream.read1(1)
    except Fault:
        return b"".join(blocks), False


def _estimated(
    location: str, packed: Packing, *, size: int | None, consumed: int | None, unpacked_bytes: int
) -> int | None:
    """The size that a packed file has unpacked, by how much its beginning grew, or by what the last member of a gzip
    file states where that goes with it; decompressors read ahead, so that a small file may be consumed before its
    end."""
    if size is None or not consumed:
        return None
    estimate = round(unpacked_bytes * max(1.0, size / consumed))
    if packed != "gzip":
        return estimate
    with open(location, "rb") as file:
        file.seek(-4, os.SEEK_END)
        stated = int.from_bytes(file.read(4), "little")
    most = 2.5 * estimate if consumed < size else 1000 * size
    return stated if 0.4 * estimate < stated < most else estimate


def _size(location: str) -> int | None:
    return remote.size_of(location) if remote.is_url(location) else os.stat(location).st_size


def _budget() -> Budget:
    return Budget(_MOST_UNPACKED, expansion=1)


def _is_shown(name: str) -> bool:
    return not any(part.startswith((".", "__MACOSX")) for part in name.split("/") if part != ".")
