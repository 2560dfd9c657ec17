"""Token shards: one file, payload first (memory-mapped), index and checksums behind it.

    offset 0      tokens, little-endian uint16 or uint32
    aligned 64    int64 offsets[documents + 1], in tokens
    aligned 64    uint64 ids[documents], xxh3-64 of each document's id
    footer        JSON: format, dtype, sections, xxh3-64 of every 1 MiB before the footer
    last 24 bytes footer length, xxh3-64 of the footer, magic

The footer's hash covers the chunk hashes, which cover everything else: it is the shard's checksum.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file, upgraded

FORMAT = 1
CHUNK_BYTES = 1 << 20
_MAGIC = b"ROPEWALK"
_TRAILER = struct.Struct("<QQ8s")
_ALIGN = 64

TokenType = Literal["uint16", "uint32"]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def token_type(vocabulary: int) -> TokenType:
    """The narrowest type that holds every token id."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def document_key(document_id: str) -> int:
    """The 64-bit key under which shards know a document."""
    return xxhash.xxh3_64_intdigest(document_id.encode())


@dataclass(frozen=True, slots=True)
class Written:
    """What a finished shard holds."""

    documents: int
    tokens: int
    bytes: int
    checksum: str


def write_shard(path: Path, documents: Iterator[tuple[int, Tokens]], *, dtype: TokenType) -> Written:
    """Commits a shard of `(document_key, tokens)` pairs in order. Memory: one document and the index."""
    little = np.dtype(dtype).newbyteorder("<")
    largest = np.iinfo(dtype).max
    keys: list[int] = []
    offsets = [0]
    with committed_file(path) as file:
        hashed = _HashedFile(file)
        for key, tokens in documents:
            if len(tokens) and int(tokens.max()) > largest:
                raise DataError(f"{path}: token {tokens.max()} does not fit in {dtype}; its vocabulary is wrong")
            hashed.write(np.ascontiguousarray(tokens, dtype=little).tobytes())
            keys.append(key)
            offsets.append(offsets[-1] + len(tokens))
        sections = {"tokens": [0, hashed.position]}
        for name, array in (("offsets", np.array(offsets, "<i8")), ("ids", np.array(keys, "<u8"))):
            hashed.write(b"\0" * (-hashed.position % _ALIGN))
            start = hashed.position
            hashed.write(array.tobytes())
            sections[name] = [start, hashed.position]
        footer = {
            "format": FORMAT,
            "kind": "tokens",
            "dtype": dtype,
            "documents": len(keys),
            "tokens": offsets[-1],
            "sections": sections,
            "chunk_bytes": CHUNK_BYTES,
            "chunks": hashed.finish(),
        }
        body = json.dumps(footer, separators=(",", ":")).encode()
        checksum = xxhash.xxh3_64_intdigest(body)
        file.write(body + _TRAILER.pack(len(body), checksum, _MAGIC))
        size = file.tell()
    return Written(documents=len(keys), tokens=offsets[-1], bytes=size, checksum=f"{checksum:016x}")


class Shard:
    """A shard opened for reading; tokens are memory-mapped, nothing is copied until asked for."""

    def __init__(self, path: Path, *, checksum: str | None = None) -> None:
        self.path = path
        self._footer, self._end, self.checksum = _read_footer(path)
        if checksum is not None and checksum != self.checksum:
            raise _damaged(path, f"its checksum is {self.checksum}, the manifest says {checksum}")
        self._map = np.memmap(path, dtype=np.uint8, mode="r")
        sections = self._footer["sections"]
        little = np.dtype(self._footer["dtype"]).newbyteorder("<")
        self.tokens: Tokens = self._map[slice(*sections["tokens"])].view(little)
        self.offsets: npt.NDArray[np.int64] = self._map[slice(*sections["offsets"])].view("<i8")
        self.ids: npt.NDArray[np.uint64] = self._map[slice(*sections["ids"])].view("<u8")

    def __len__(self) -> int:
        return int(self._footer["documents"])

    def document(self, index: int) -> Tokens:
        """The tokens of document `index`, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} holds {len(self)} documents; there is no number {index}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def verify(self) -> None:
        """Reads the whole shard (about 5 GB/s from memory); DataError names the first damaged range."""
        size = self._footer["chunk_bytes"]
        for index, expected in enumerate(self._footer["chunks"]):
            chunk = self._map[index * size : min((index + 1) * size, self._end)]
            if xxhash.xxh3_64_intdigest(chunk.data) != expected:
                last = index * size + len(chunk)
                raise _damaged(self.path, f"bytes {index * size} to {last} are not what was written")


class _HashedFile:
    """Writes through to a file and hashes every chunk of CHUNK_BYTES."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self._chunks: list[int] = []
        self.position = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        view = memoryview(data)
        while view:
            room = CHUNK_BYTES - self.position % CHUNK_BYTES
            part, view = view[:room], view[room:]
            self._hash.update(part)
            self.position += len(part)
            if self.position % CHUNK_BYTES == 0:
                self._close_chunk()

    def finish(self) -> list[int]:
        if self.position % CHUNK_BYTES:
            self._close_chunk()
        return self._chunks

    def _close_chunk(self) -> None:
        self._chunks.append(self._hash.intdigest())
        self._hash = xxhash.xxh3_64()


def _read_footer(path: Path) -> tuple[dict[str, Any], int, str]:
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            file.seek(max(0, size - _TRAILER.size))
            length, checksum, magic = _TRAILER.unpack(file.read(_TRAILER.size))
            start = size - _TRAILER.size - length
            if magic != _MAGIC or start < 0:
                raise _damaged(path, "it does not end as a shard ends")
            file.seek(start)
            body = file.read(length)
    except FileNotFoundError:
        raise DataError(f"{path}: this shard is missing; {_REMEDY}") from None
    except struct.error:
        raise _damaged(path, f"it is only {size} bytes long") from None
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check its permissions") from None
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise _damaged(path, "its footer is not what was written")
    footer = upgraded(json.loads(body), path=path, what="shard", current=FORMAT, upgrades={})
    if footer["kind"] != "tokens":
        raise DataError(f"{path}: this shard holds {footer['kind']}, not tokens")
    if footer["sections"]["ids"][1] != start:
        raise _damaged(path, f"{start} bytes precede its footer, {footer['sections']['ids'][1]} were written")
    return footer, start, f"{checksum:016x}"


_REMEDY = "delete its folder and run `ropewalk prepare` again, or restore it from a copy"


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path}: damaged shard: {why}; {_REMEDY}")
