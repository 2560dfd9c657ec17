"""Token shards: the frame of `frame.py` around tokens (memory-mapped unless compressed) and an index of documents.

    offset 0      tokens, little-endian uint16 or uint32; with compression, Zstandard blocks of 1 MiB of them each
    aligned 64    int64 offsets[documents + 1], in tokens
    aligned 64    uint64 ids[documents], xxh3-64 of each document's id
    aligned 64    int64 text_bytes[documents], UTF-8 bytes behind the tokens of each document; may be absent
    aligned 64    bits counts[tokens], whether the loss counts the token as a target; absent when all count
    aligned 64    int64 blocks[blocks + 1], where compressed blocks begin and the last one ends; absent without
    aligned 64    uint64 block_hashes[blocks], xxh3-64 of each block as it is stored

Bit i is bit i % 8 of byte i // 8, the lowest first. Without compression everything but the footer is as in format 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.files import PARTIAL, committed_file

from . import frame as frames
from .compression import Compression, compress, decompress
from .frame import Frame, FrameWriter, damaged, local_frame

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


def write_runs(
    path: Path, runs: Iterable[Run], *, dtype: TokenType, encoder: str = "", compression: Compression = "off"
) -> Written:
    """Commits a shard of runs of documents in order. Memory: one run, the index, a byte a token where counts are given.

    `encoder` names the algorithm that made the tokens. Bytes do not depend on how documents are divided into runs.
    """
    with committed_file(path) as file:
        return write_runs_to(file, runs, dtype=dtype, encoder=encoder, compression=compression)


def write_runs_to(
    file: IO[bytes],
    runs: Iterable[Run],
    *,
    dtype: TokenType,
    encoder: str = "",
    compression: Compression = "off",
    key: str = "",
) -> Written:
    """The same into an open file, which the caller commits. `key` says what the file was made from, where that is not
    said by a manifest."""
    index, path = _Index(), Path(file.name.removesuffix(PARTIAL))
    writer = FrameWriter(file)
    payload = _Blocks(writer) if compression == "zstd" else writer
    for run in runs:
        payload.write(_payload(run.tokens, path=path, dtype=dtype))
        index.add(run)
    if isinstance(payload, _Blocks):
        payload.finish()
    writer.end_payload("tokens")
    for name, array in index.sections():
        writer.section(name, array)
    if isinstance(payload, _Blocks):
        writer.section("blocks", np.array(payload.starts, "<i8"))
        writer.section("block_hashes", np.array(payload.hashes, "<u8"))
    checksum = writer.finish(
        kind="tokens",
        dtype=dtype,
        documents=index.documents,
        tokens=index.tokens,
        encoder=encoder,
        compression=compression,
        **({"key": key} if key else {}),
    )
    return Written(documents=index.documents, tokens=index.tokens, bytes=file.tell(), checksum=checksum)


class Shard:
    """A local shard opened for reading; tokens are memory-mapped, nothing is copied until asked for.

    Compressed tokens are unpacked, all of them, when they are first asked for: right for prepare and evaluation.
    Training reads such shards block by block (`remote.RemoteShard`).
    """

    def __init__(self, path: Path, *, checksum: str | None = None) -> None:
        self.path = path
        self._frame = local_frame(path, kinds=("tokens",))
        self._frame.expect(checksum)
        self.checksum = self._frame.checksum
        self.layout = TokenLayout(self._frame)
        self._map = np.memmap(path, dtype=np.uint8, mode="r")
        self._sound: set[int] = set()
        """Chunks that were verified one by one."""
        offsets, ids = self._section("offsets", "<i8"), self._section("ids", "<u8")
        assert offsets is not None, "every shard has offsets"
        assert ids is not None, "every shard has ids"
        self.offsets: npt.NDArray[np.int64] = offsets
        self.ids: npt.NDArray[np.uint64] = ids
        self.text_bytes: npt.NDArray[np.int64] | None = self._section("text_bytes", "<i8")
        """UTF-8 bytes behind the tokens of each document, where the writer gave them."""

    @cached_property
    def tokens(self) -> Tokens:
        """All tokens of the shard."""
        start, stop = self._frame.section("tokens") or (0, 0)
        if not self.compressed:
            tokens: Tokens = self._map[start:stop].view(self.layout.dtype)
            return tokens
        starts = self._blocks()
        parts = [
            self.layout.decode(block, self._map[starts[block] : starts[block + 1]].data)
            for block in range(len(starts) - 1)
        ]
        return np.concatenate([np.zeros(0, self.layout.dtype), *parts])

    @property
    def compressed(self) -> bool:
        """Whether tokens have to be unpacked."""
        return self.layout.compressed

    @property
    def token_count(self) -> int:
        """Tokens in the shard."""
        return self.layout.token_count

    def __len__(self) -> int:
        return self.layout.documents

    @property
    def encoder(self) -> str:
        """The algorithm that made the tokens; empty when the writer did not say."""
        return str(self._frame.footer["encoder"])

    @property
    def key(self) -> str:
        """What the file was made from; empty when the writer did not say."""
        return str(self._frame.footer.get("key", ""))

    def document(self, index: int) -> Tokens:
        """The tokens of document `index`, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.path} holds {len(self)} documents; there is no number {index}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def count_bits(self) -> npt.NDArray[np.uint8] | None:
        """Whether the loss counts each token as a target, in bits as they are stored; None: all of them."""
        bits: npt.NDArray[np.uint8] | None = self._section("counts", "u1")
        return bits

    def counts(self, start: int, stop: int) -> Counts:
        """Whether the loss counts each of the tokens `start` to `stop` (exclusive) as a target."""
        if not 0 <= start <= stop <= self.token_count:
            raise IndexError(f"{self.path} holds {self.token_count} tokens; there are no {start} to {stop}")
        return unpacked_counts(self.count_bits, start, stop)

    def run(self, documents: npt.NDArray[np.int64]) -> Run:
        """A copy of the numbered documents, for another shard."""
        starts, stops = self.offsets[documents], self.offsets[documents + 1]
        lengths = stops - starts
        joined = len(documents) == 0 or bool((starts[1:] == stops[:-1]).all())
        # Documents that follow each other, which is the rule, are one slice: no index of 8 bytes a token.
        places = slice(starts[0], stops[-1]) if joined and len(documents) else _ranges(starts, lengths)
        return Run(
            keys=self.ids[documents],
            lengths=lengths,
            tokens=self.tokens[places],
            counts=None if self.count_bits is None else self.counts(0, self.token_count)[places],
            text_bytes=None if self.text_bytes is None else self.text_bytes[documents],
        )

    def verify(self) -> None:
        """Reads the whole shard (about 5 GB/s from memory); DataError names the first damaged range and the documents
        in it."""
        for chunk in self.damaged_chunks():
            raise damaged(str(self.path), self.damage(chunk))

    def verify_index(self) -> None:
        """Reads what follows the tokens, of which documents lie where; DataError as `verify`."""
        _, end = self._frame.section("tokens") or (0, 0)
        self._verify(self._frame.chunks_of(end, self._frame.end))

    def verify_documents(self, first: int, last: int) -> None:
        """Reads the index and the tokens of documents `first` to `last` (exclusive); DataError as `verify`."""
        if self.compressed:
            return self.verify()
        self.verify_index()
        size = self.layout.dtype.itemsize
        begin, end = (int(self.offsets[place]) * size for place in (first, last))
        return self._verify(self._frame.chunks_of(begin, end))

    def _verify(self, chunks: range) -> None:
        for number in chunks:
            if number not in self._sound:
                if self._frame.is_damaged(number, self._map):
                    raise damaged(str(self.path), self.damage(number))
                self._sound.add(number)

    def damaged_chunks(self) -> Iterator[int]:
        """Numbers of the chunks that are not what was written; reads the whole shard."""
        yield from self._frame.damaged_chunks(self._map)

    def damage(self, chunk: int) -> str:
        """A damaged chunk in words: its bytes and the documents in it."""
        item = self._frame.chunk(chunk)
        documents = self.damaged_documents(chunk)
        held = f"they hold {_numbered(documents, self.ids)}" if len(documents) else "they hold the index"
        return f"bytes {item.start} to {item.stop} are not what was written ({held})"

    def damaged_tokens(self, chunk: int) -> range:
        """The tokens that chunk `chunk` of the file spoils; empty when it holds the index alone."""
        item = self._frame.chunk(chunk)
        if not self.compressed:
            return self.layout.tokens_in(item.start, item.stop)
        starts = self._blocks()
        first = int(np.searchsorted(starts, item.start, side="right")) - 1
        last = int(np.searchsorted(starts, item.stop, side="left"))
        if first >= len(starts) - 1:
            return range(0)
        size = self.layout.chunk_tokens
        return range(first * size, min(last * size, self.token_count))

    def damaged_documents(self, chunk: int) -> range:
        """Numbers of the documents with a token in chunk `chunk` of the file."""
        return documents_of(self.offsets, self.damaged_tokens(chunk))

    def _section(self, name: str, dtype: str) -> Any:
        place = self._frame.section(name)
        return None if place is None else self._map[slice(*place)].view(dtype)

    def _blocks(self) -> npt.NDArray[np.int64]:
        starts: npt.NDArray[np.int64] = self._section("blocks", "<i8")
        return starts


class TokenLayout:
    """How tokens lie in a shard: which chunk or block holds which, and what its bytes mean."""

    def __init__(self, frame: Frame) -> None:
        self.file = frame.file
        self.dtype = np.dtype(frame.footer["dtype"]).newbyteorder("<")
        self.token_count = int(frame.footer["tokens"])
        self.documents = int(frame.footer["documents"])
        self.compressed: bool = frame.footer["compression"] == "zstd"
        self.chunk_tokens = frame.chunk_bytes // self.dtype.itemsize
        """Tokens of a chunk, or of a compressed block; the last has fewer."""

    def chunks_of(self, start: int, stop: int) -> range:
        """Numbers of the chunks (blocks) that hold tokens `start` to `stop` (exclusive)."""
        return range(start // self.chunk_tokens, -(-stop // self.chunk_tokens) if stop > start else 0)

    def tokens_of(self, chunk: int) -> range:
        """The tokens of chunk (block) `chunk`."""
        return range(chunk * self.chunk_tokens, min((chunk + 1) * self.chunk_tokens, self.token_count))

    def tokens_in(self, start: int, stop: int) -> range:
        """The tokens with a byte between `start` and `stop` of an uncompressed file."""
        size = self.dtype.itemsize
        return range(min(start // size, self.token_count), min(-(-stop // size), self.token_count))

    def decode(self, chunk: int, data: bytes | memoryview) -> Tokens:
        """The tokens of chunk (block) `chunk` from its stored bytes, which are checked already."""
        held = self.tokens_of(chunk)
        if self.compressed:
            where = f"{self.file}: block {chunk}"
            data = decompress(data, raw_bytes=len(held) * self.dtype.itemsize, where=where)
        # The chunk in which tokens end also holds the beginning of the index.
        tokens: Tokens = np.frombuffer(data, self.dtype, count=len(held))
        return tokens


def documents_of(offsets: npt.NDArray[np.int64], tokens: range) -> range:
    """Numbers of the documents that have one of `tokens`."""
    if not len(tokens):
        return range(0)
    first = int(np.searchsorted(offsets, tokens.start, side="right")) - 1
    return range(first, int(np.searchsorted(offsets, tokens.stop, side="left")))


def unpacked_counts(bits: npt.NDArray[np.uint8] | None, start: int, stop: int) -> Counts:
    """Whether each of the tokens `start` to `stop` (exclusive) counts; without bits, all do."""
    if bits is None:
        return np.ones(stop - start, bool)
    first = start // 8
    packed = bits[first : -(-stop // 8)]
    return np.unpackbits(packed, bitorder="little")[start - 8 * first : stop - 8 * first].view(np.bool_)


class _Blocks:
    """Gathers the payload into blocks of CHUNK_BYTES and writes each compressed."""

    def __init__(self, writer: FrameWriter) -> None:
        self._writer = writer
        self._held = bytearray()
        self.starts = [0]
        self.hashes: list[int] = []

    def write(self, data: bytes | memoryview) -> None:
        self._held += data
        size = frames.CHUNK_BYTES
        whole = len(self._held) // size * size
        for start in range(0, whole, size):
            self._put(bytes(self._held[start : start + size]))
        del self._held[:whole]

    def finish(self) -> None:
        if self._held:
            self._put(bytes(self._held))

    def _put(self, raw: bytes) -> None:
        block = compress(raw)
        self.hashes.append(xxhash.xxh3_64_intdigest(block))
        self._writer.write(block)
        self.starts.append(self._writer.position)


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


def _numbered(documents: range, keys: npt.NDArray[np.uint64]) -> str:
    """Documents in words, with the keys of the first few."""
    names = ", ".join(f"{int(key):016x}" for key in keys[documents.start : min(documents.stop, documents.start + 3)])
    more = ", ..." if len(documents) > 3 else ""
    if len(documents) == 1:
        return f"document {documents.start}, key {names}"
    return f"documents {documents.start} to {documents.stop - 1}, keys {names}{more}"
