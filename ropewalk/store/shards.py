"""Token shards: one file, payload first (memory-mapped), index and checksums behind it.

    offset 0      tokens, little-endian uint16 or uint32
    aligned 64    int64 offsets[documents + 1], in tokens
    aligned 64    uint64 ids[documents], xxh3-64 of each document's id
    aligned 64    int64 text_bytes[documents], UTF-8 bytes behind the tokens of each document; may be absent
    aligned 64    bits counts[tokens], whether the loss counts the token as a target; absent when all count
    footer        JSON: format, dtype, encoder, sections, xxh3-64 of every 1 MiB before the footer
    last 24 bytes footer length, xxh3-64 of the footer, magic

Bit i is bit i % 8 of byte i // 8, the lowest first. The footer's hash covers the chunk hashes, which cover everything
else: it is the shard's checksum.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file, upgraded

FORMAT = 2
CHUNK_BYTES = 1 << 20
_MAGIC = b"ROPEWALK"
_TRAILER = struct.Struct("<QQ8s")
_ALIGN = 64

TokenType = Literal["uint16", "uint32"]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Counts = npt.NDArray[np.bool_]


def token_type(vocabulary: int) -> TokenType:
    """The narrowest type that holds every token id."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def document_key(document_id: str) -> int:
    """The 64-bit key under which shards know a document."""
    return xxhash.xxh3_64_intdigest(document_id.encode())


class Document(NamedTuple):
    """One document to write; a plain tuple of as many fields does as well."""

    key: int
    tokens: Tokens
    counts: Counts | None = None
    """Whether the loss counts each token as a target; None: all of them."""


@dataclass(frozen=True, slots=True)
class Run:
    """Documents to write one after the other, as arrays: what is done a document at a time costs microseconds each."""

    keys: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]
    """Tokens of each document."""
    tokens: Tokens
    """Of all documents, joined."""
    counts: Counts | None = None
    """One a token; None: all count."""
    text_bytes: npt.NDArray[np.int64] | None = None
    """UTF-8 bytes behind the tokens of each document; given for every run of a shard or for none."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a finished shard holds."""

    documents: int
    tokens: int
    bytes: int
    checksum: str


def write_shard(path: Path, documents: Iterable[Document | tuple[int, Tokens]], *, dtype: TokenType) -> Written:
    """Commits a shard of `(key, tokens)` or `(key, tokens, counts)` in order."""
    return write_runs(path, map(_run_of_one, documents), dtype=dtype)


def write_runs(path: Path, runs: Iterable[Run], *, dtype: TokenType, encoder: str = "") -> Written:
    """Commits a shard of runs of documents in order. Memory: one run, the index, a byte a token where counts are given.

    `encoder` names the algorithm that made the tokens. Bytes do not depend on how documents are divided into runs.
    """
    index = _Index()
    with committed_file(path) as file:
        hashed = _HashedFile(file)
        for run in runs:
            hashed.write(_payload(run.tokens, path=path, dtype=dtype))
            index.add(run)
        sections = {"tokens": [0, hashed.position]}
        for name, array in index.sections():
            hashed.write(b"\0" * (-hashed.position % _ALIGN))
            start = hashed.position
            hashed.write(array.tobytes())
            sections[name] = [start, hashed.position]
        footer = {
            "format": FORMAT,
            "kind": "tokens",
            "dtype": dtype,
            "documents": index.documents,
            "tokens": index.tokens,
            "encoder": encoder,
            "sections": sections,
            "chunk_bytes": CHUNK_BYTES,
            "chunks": hashed.finish(),
        }
        body = json.dumps(footer, separators=(",", ":")).encode()
        checksum = xxhash.xxh3_64_intdigest(body)
        file.write(body + _TRAILER.pack(len(body), checksum, _MAGIC))
        size = file.tell()
    return Written(documents=index.documents, tokens=index.tokens, bytes=size, checksum=f"{checksum:016x}")


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
        self.text_bytes: npt.NDArray[np.int64] | None = None
        """UTF-8 bytes behind the tokens of each document, where the writer gave them."""
        if "text_bytes" in sections:
            self.text_bytes = self._map[slice(*sections["text_bytes"])].view("<i8")

    def __len__(self) -> int:
        return int(self._footer["documents"])

    @property
    def encoder(self) -> str:
        """The algorithm that made the tokens; empty when the writer did not say."""
        return str(self._footer["encoder"])

    def document(self, index: int) -> Tokens:
        """The tokens of document `index`, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} holds {len(self)} documents; there is no number {index}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def counts(self, start: int, stop: int) -> Counts:
        """Whether the loss counts each of the tokens `start` to `stop` (exclusive) as a target."""
        if not 0 <= start <= stop <= len(self.tokens):
            raise IndexError(f"{self.path} holds {len(self.tokens)} tokens; there are no {start} to {stop}")
        if "counts" not in self._footer["sections"]:
            return np.ones(stop - start, bool)
        first = start // 8
        begin = self._footer["sections"]["counts"][0]
        packed = self._map[begin + first : begin + -(-stop // 8)]
        bits = np.unpackbits(packed, bitorder="little")[start - 8 * first : stop - 8 * first]
        return bits.view(np.bool_)

    def run(self, documents: npt.NDArray[np.int64]) -> Run:
        """A copy of the numbered documents, for another shard."""
        starts, stops = self.offsets[documents], self.offsets[documents + 1]
        lengths = stops - starts
        joined = len(documents) == 0 or bool((starts[1:] == stops[:-1]).all())
        # Documents that follow each other, which is the rule, are one slice: no index of 8 bytes a token.
        places = slice(starts[0], stops[-1]) if joined and len(documents) else _ranges(starts, lengths)
        masked = "counts" in self._footer["sections"]
        return Run(
            keys=self.ids[documents],
            lengths=lengths,
            tokens=self.tokens[places],
            counts=self.counts(0, len(self.tokens))[places] if masked else None,
            text_bytes=None if self.text_bytes is None else self.text_bytes[documents],
        )

    def verify(self) -> None:
        """Reads the whole shard (about 5 GB/s from memory); DataError names the first damaged range."""
        size = self._footer["chunk_bytes"]
        for index, expected in enumerate(self._footer["chunks"]):
            chunk = self._map[index * size : min((index + 1) * size, self._end)]
            if xxhash.xxh3_64_intdigest(chunk.data) != expected:
                last = index * size + len(chunk)
                raise _damaged(self.path, f"bytes {index * size} to {last} are not what was written")


class _Index:
    """What follows the tokens, gathered run by run."""

    def __init__(self) -> None:
        self.documents = self.tokens = 0
        self._keys: list[npt.NDArray[np.uint64]] = []
        self._lengths: list[npt.NDArray[np.int64]] = []
        self._text_bytes: list[npt.NDArray[np.int64]] = []
        self._counts: list[tuple[int, Counts]] = []

    def add(self, run: Run) -> None:
        assert len(run.keys) == len(run.lengths), "a key and a length for every document"
        assert int(run.lengths.sum()) == len(run.tokens), "lengths add up to the tokens"
        assert run.counts is None or len(run.counts) == len(run.tokens), "a count for every token"
        assert self.documents == 0 or (run.text_bytes is None) == (not self._text_bytes), "text_bytes: all or none"
        self._keys.append(run.keys)
        self._lengths.append(run.lengths)
        if run.text_bytes is not None:
            self._text_bytes.append(run.text_bytes)
        if run.counts is not None and not run.counts.all():
            self._counts.append((self.tokens, run.counts))
        self.documents += len(run.keys)
        self.tokens += len(run.tokens)

    def sections(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        offsets = np.zeros(self.documents + 1, "<i8")
        if self._keys:
            np.cumsum(np.concatenate(self._lengths), out=offsets[1:])
        yield "offsets", offsets
        yield "ids", np.concatenate([np.zeros(0, "<u8"), *self._keys])
        if self._text_bytes:
            yield "text_bytes", np.concatenate(self._text_bytes).astype("<i8")
        if self._counts:
            counts = np.ones(self.tokens, bool)
            for start, part in self._counts:
                counts[start : start + len(part)] = part
            yield "counts", np.packbits(counts, bitorder="little")


class _HashedFile:
    """Writes through to a file and hashes every chunk of CHUNK_BYTES."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self._chunks: list[int] = []
        self.position = 0

    def write(self, data: bytes | memoryview) -> None:
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


def _run_of_one(document: Document | tuple[int, Tokens]) -> Run:
    key, tokens, counts = Document(*document)
    return Run(np.array([key], np.uint64), np.array([len(tokens)], np.int64), tokens, counts)


def _payload(tokens: Tokens, *, path: Path, dtype: TokenType) -> memoryview:
    if tokens.dtype != dtype and len(tokens) and int(tokens.max()) > np.iinfo(dtype).max:
        raise DataError(f"{path}: token {tokens.max()} does not fit in {dtype}; its vocabulary is wrong")
    return np.ascontiguousarray(tokens, dtype=np.dtype(dtype).newbyteorder("<")).view(np.uint8).data


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """start, start + 1, ... of each range, joined."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


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
    footer = upgraded(json.loads(body), path=path, what="shard", current=FORMAT, upgrades={1: _from_1})
    if footer["kind"] != "tokens":
        raise DataError(f"{path}: this shard holds {footer['kind']}, not tokens")
    written = max(end for _, end in footer["sections"].values())
    if written != start:
        raise _damaged(path, f"{start} bytes precede its footer, {written} were written")
    return footer, start, f"{checksum:016x}"


def _from_1(footer: dict[str, Any]) -> dict[str, Any]:
    """Format 2 adds sections that may be absent, and who made the tokens."""
    return {**footer, "encoder": ""}


_REMEDY = "delete its folder and run `ropewalk prepare` again, or restore it from a copy"


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path}: damaged shard: {why}; {_REMEDY}")
