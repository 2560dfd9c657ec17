"""Bytes in bounded amounts: streams that unpack, whole documents up to a limit, lines of any length.

A stream that unpacks says so when its packed bytes are damaged, also when they end too early: `zstandard`'s own reader
takes a truncated file for a whole one, Arrow's does not.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa

from ..formats import Packing
from .item import Budget, Fault

BLOCK_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 16
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, struct.error)
"""What the standard library raises for packed bytes that make no sense, apart from OSError."""


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

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        if self._fault is None:
            try:
                # A little at a time: what a decompressor has when it meets the damage, it keeps to itself.
                data = self._stream.read1(min(len(view), _BUFFER_BYTES))
                self._budget.spend(len(data))
                view[: len(data)] = data
                return len(data)
            except Fault as fault:
                self._fault = fault
            except _DAMAGE:
                self._fault = Fault("damaged")
            except OSError as error:
                # Decompressors raise OSError without an errno for bytes that make no sense.
                if error.errno is not None:
                    raise
                self._fault = Fault("damaged")
        # Again and again: a decompressor that goes on behind damage would make up bytes.
        raise self._fault


def buffered(stream: Readable, *, budget: Budget) -> io.BufferedReader:
    """`stream`, guarded, with the methods of a file that is open for reading."""
    return io.BufferedReader(Guarded(stream, budget=budget), _BUFFER_BYTES)


def unpacked(stream: io.BufferedReader, packing: Packing, *, budget: Budget) -> io.BufferedReader:
    """What is inside a packed stream."""
    if packing == "gzip":
        return buffered(gzip.GzipFile(fileobj=stream), budget=budget)
    if packing == "bz2":
        return buffered(bz2.BZ2File(stream), budget=budget)
    if packing == "zstd":
        return buffered(pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd"), budget=budget)
    return stream


def whole(stream: Readable, *, limit: int) -> bytes:
    """All that is left of `stream`; Fault with its size when that is more than `limit`."""
    blocks = []
    size = 0
    while block := stream.read1(BLOCK_BYTES):
        size += len(block)
        if size <= limit:
            blocks.append(block)
        else:
            blocks.clear()
    if size > limit:
        raise Fault("too_large", value=size, threshold=limit)
    return b"".join(blocks)


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
