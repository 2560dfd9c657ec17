"""Bytes in bounded amounts: streams that unpack, whole documents up to a limit, lines of any length.

A stream that unpacks says so when its packed bytes are damaged, also when they end too early: `zstandard`'s own reader
takes a truncated file for a whole one, Arrow's does not. A checksum stands behind the bytes that it covers: when it
turns out wrong they have been read, and the fault `checksum` says that none of them can be trusted.
"""

from __future__ import annotations

import bz2
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

from ..formats import Packing
from .item import Budget, Fault

BLOCK_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 16
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, struct.error)
"""What the standard library raises for packed bytes that make no sense, apart from OSError."""
_WRONG_CHECKSUM = ("incorrect data check", "incorrect length check", "Bad CRC-32", "doesn't match checksum")
"""Words of zlib, `zipfile` and zstd for that."""


class Readable(Protocol):
    """Anything that gives some of its next bytes, at most as many as asked for."""

    def read1(self, size: int, /) -> bytes: ...


class Guarded(io.RawIOBase):
    """A stream that counts what it unpacks and raises `Fault` where its bytes are damaged.

    Errors of the file system or the network pass through: they tell nothing about the document.
    """

    def __init__(self, stream: Readable, *, budget: Budget) -> None:
        self._stream, self._budget = stream, budget
        self._fault: Fault | None = None
        self._begun = False

    @property
    def checked(self) -> int:
        """How many parts of the stream were found right by their checksums, as far as it was read."""
        return getattr(self._stream, "checked", 0)

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        if self._fault is None:
            try:
                # A little at a time: what a decompressor has when it meets the damage, it keeps to itself.
                data = self._stream.read1(min(len(view), _BUFFER_BYTES))
                self._begun = True
                self._budget.spend(len(data))
                view[: len(data)] = data
                return len(data)
            except Fault as fault:
                self._fault = fault
            except _DAMAGE as error:
                self._fault = self._named(error)
            except OSError as error:
                # Decompressors raise OSError without an errno for bytes that make no sense.
                if error.errno is not None:
                    raise
                self._fault = self._named(error)
        # Again and again: a decompressor that goes on behind damage would make up bytes.
        raise self._fault

    def _named(self, error: Exception) -> Fault:
        # bz2 checks each block after its bytes and has one word for all that is wrong; before the first it is no bz2.
        wrong = (*_WRONG_CHECKSUM, "Invalid data stream") if self._begun else _WRONG_CHECKSUM
        return Fault("checksum" if any(words in str(error) for words in wrong) else "damaged")


def checked_parts(stream: io.BufferedReader) -> int:
    """How many parts of a stream were found right by their checksums, as far as it was read; 0 if it has none."""
    raw = stream.raw
    return raw.checked if isinstance(raw, Guarded) else 0


def buffered(stream: Readable, *, budget: Budget) -> io.BufferedReader:
    """`stream`, guarded, with the methods of a file that is open for reading."""
    return io.BufferedReader(Guarded(stream, budget=budget), _BUFFER_BYTES)


def unpacked(stream: io.BufferedReader, packing: Packing, *, budget: Budget) -> io.BufferedReader:
    """What is inside a packed stream."""
    if packing == "gzip":
        return buffered(_Gzip(stream), budget=budget)
    if packing == "bz2":
        return buffered(bz2.BZ2File(stream), budget=budget)
    if packing == "zstd":
        import pyarrow as pa  # slow to import, and most files need none

        return buffered(pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd"), budget=budget)
    return stream


class _Gzip:
    """What is inside a gzip file, member by member. Not by `gzip`, which does not tell where a member ends."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._inflate = zlib.decompressobj(_GZIP)
        self.checked = 0
        """Members whose checksums are right: what was read before the last of them ended is as it was packed."""

    def read1(self, size: int, /) -> bytes:
        packed = self._inflate.unconsumed_tail
        while True:
            if self._inflate.eof:
                packed = self._following()
                if not packed:
                    return b""
            packed = packed or self._stream.read1(_BUFFER_BYTES)
            if not packed:
                raise EOFError
            data = self._inflate.decompress(packed, size)
            if data:
                return data
            packed = self._inflate.unconsumed_tail

    def _following(self) -> bytes:
        """The beginning of the next member, empty at the end of the file, which may have zeros there."""
        rest = self._inflate.unused_data.lstrip(b"\0")
        while not rest and (block := self._stream.read1(_BUFFER_BYTES)):
            rest = block.lstrip(b"\0")
        if rest:
            self._inflate = zlib.decompressobj(_GZIP)
            self.checked += 1
        return rest


_GZIP = zlib.MAX_WBITS + 16
"""How `zlib` is told to read the headers and checksums of gzip."""


def blocks(stream: Readable) -> Iterator[bytes]:
    """All that is left of `stream`, a block at a time."""
    while block := stream.read1(BLOCK_BYTES):
        yield block


def whole(stream: Readable, *, limit: int) -> bytes:
    """All that is left of `stream`; Fault with its size when that is more than `limit`."""
    held = []
    size = 0
    for block in blocks(stream):
        size += len(block)
        if size <= limit:
            held.append(block)
        else:
            held.clear()
    if size > limit:
        raise Fault("too_large", value=size, threshold=limit)
    return b"".join(held)


def lines(stream: Readable, *, limit: int, length: int | None = None) -> Iterator[tuple[bytes, int]]:
    """(line without its end, bytes in it) of the next `length` bytes; of a line above `limit`, only its beginning."""
    held: list[bytes] = []
    size = 0
    left = length
    while block := stream.read1(BLOCK_BYTES if left is None else min(BLOCK_BYTES, left)):
        left = None if left is None else left - len(block)
        first, *rest = block.split(b"\n")
        if size <= limit:
            held.append(first)
        size += len(first)
        if rest:
            yield b"".join(held), size
            for line in rest[:-1]:
                yield line, len(line)
            held, size = [rest[-1]], len(rest[-1])
    if size:
        yield b"".join(held), size
