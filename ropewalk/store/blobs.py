"""Shards of documents that are not tokens: bytes of any media type (images, audio, video), or arrays of one dtype.

    offset 0      documents, each aligned to 64 bytes; with compression, each a Zstandard block
    aligned 64    int64 starts[documents], int64 lengths[documents], where each lies as stored
    aligned 64    uint64 hashes[documents], xxh3-64 of each as stored; uint64 ids[documents], xxh3-64 of each name
    aligned 64    names and notes, UTF-8, joined, with int64 offsets[documents + 1] each; a note is JSON or empty
    aligned 64    uint16 types[documents], place in the footer's `media_types`           (kind `bytes`)
    aligned 64    int64 shapes, joined, with int64 shape_offsets[documents + 1]          (kind `arrays`)
    aligned 64    int64 raw_lengths[documents]; absent without compression

The frame around it is that of `frame.py`. A document is one `Item` with its checksum and name, so it is fetched, cached
and checked by itself, from a local disk or a URL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file

from .compression import Compression, compress, decompress
from .frame import FrameWriter, Sections, damaged, fetched_frame
from .items import Fetch, Item
from .origin import Origin
from .shards import document_key

Kind = Literal["bytes", "arrays"]
_INDEX = (
    *("starts", "lengths", "hashes", "ids", "names", "name_offsets", "notes", "note_offsets"),
    *("types", "shapes", "shape_offsets", "raw_lengths"),
)
Array = npt.NDArray[Any]


class Blob(NamedTuple):
    """One document to write."""

    name: str
    """Its id: what errors and the order of the data know it by."""
    data: bytes | memoryview | Array
    """Bytes, or an array in a shard of arrays."""
    media_type: str = ""
    """`image/jpeg`, `audio/wav`, ...; empty when nobody knows."""
    note: Any = None
    """Anything JSON can hold that belongs to it: a label, a caption."""


@dataclass(frozen=True, slots=True)
class WrittenBlobs:
    """What a finished shard holds."""

    documents: int
    raw_bytes: int
    bytes: int
    checksum: str


def write_blobs(path: Path, documents: Iterable[Blob], *, compression: Compression = "off") -> WrittenBlobs:
    """Commits a shard of kind `bytes`. Most images, audio and video are compressed already: leave it off for them."""
    return _write(path, documents, kind="bytes", dtype="uint8", compression=compression)


def write_arrays(
    path: Path, documents: Iterable[Blob], *, dtype: npt.DTypeLike, compression: Compression = "off"
) -> WrittenBlobs:
    """Commits a shard of kind `arrays`: every document of `dtype` and a shape of its own."""
    return _write(path, documents, kind="arrays", dtype=np.dtype(dtype).name, compression=compression)


def open_blobs(file: str, *, fetch: Fetch | None = None, size: int | None = None, checksum: str | None = None) -> Blobs:
    """The shard in `file`, a path or a URL; its documents come through `fetch`, else straight from where it lies."""
    origin = Origin()
    return Blobs(file, fetch=fetch or origin, size=origin.size(file) if size is None else size, checksum=checksum)


class Blobs:
    """A shard of kind `bytes` or `arrays` of `size` bytes behind `fetch`. Opening reads footer and index by ranges."""

    def __init__(self, file: str, *, fetch: Fetch, size: int, checksum: str | None = None) -> None:
        self.file = file
        self._fetch = fetch
        self._frame = fetched_frame(file, fetch=fetch, size=size, kinds=("bytes", "arrays"))
        self._frame.expect(checksum)
        self.checksum = self._frame.checksum
        self.kind: Kind = self._frame.footer["kind"]
        self.dtype = np.dtype(self._frame.footer["dtype"]).newbyteorder("<")
        """Of the arrays; uint8 for bytes."""
        self._media_types: list[str] = self._frame.footer["media_types"]
        self.compressed: bool = self._frame.footer["compression"] == "zstd"
        """Whether `decode` has something to do."""
        index = Sections(self._frame, fetch, _INDEX)
        self._starts: npt.NDArray[np.int64] = _present(index.array("starts", "<i8"))
        self._lengths: npt.NDArray[np.int64] = _present(index.array("lengths", "<i8"))
        self._hashes: npt.NDArray[np.uint64] = _present(index.array("hashes", "<u8"))
        self.ids: npt.NDArray[np.uint64] = _present(index.array("ids", "<u8"))
        self._names = _Texts(index, "names", "name_offsets")
        self._notes = _Texts(index, "notes", "note_offsets")
        self._types = index.array("types", "<u2")
        self._shapes, self._shape_offsets = index.array("shapes", "<i8"), index.array("shape_offsets", "<i8")
        self._raw_lengths = index.array("raw_lengths", "<i8")

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each document as stored."""
        return self._lengths

    def item(self, index: int) -> Item:
        """What to fetch for document `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.file} holds {len(self)} documents; there is no number {index}")
        start = int(self._starts[index])
        return Item(
            self.file,
            start,
            start + int(self._lengths[index]),
            checksum=int(self._hashes[index]),
            name=self._names.of(index),
        )

    def name(self, index: int) -> str:
        """The id of document `index`."""
        return self._names.of(index)

    def note(self, index: int) -> Any:
        """What was written beside document `index`: a label, a caption; None without."""
        text = self._notes.of(index)
        return json.loads(text) if text else None

    def media_type(self, index: int) -> str:
        """Media type of document `index`; empty when nobody knew, and for arrays."""
        return "" if self._types is None else self._media_types[int(self._types[index])]

    def decode(self, index: int, data: bytes | memoryview) -> bytes | memoryview:
        """The bytes of document `index` from those of its item."""
        if not self.compressed or self._raw_lengths is None:
            return data
        where = f"{self.file}: document {self._names.of(index)}"
        return decompress(data, raw_bytes=int(self._raw_lengths[index]), where=where)

    def array(self, index: int, data: bytes | memoryview) -> Array:
        """Document `index` of a shard of arrays from the bytes of its item; read-only."""
        if self._shapes is None or self._shape_offsets is None:
            raise DataError(f"{self.file}: this shard holds bytes, not arrays; decode them by their media type")
        shape = self._shapes[self._shape_offsets[index] : self._shape_offsets[index + 1]]
        return np.frombuffer(self.decode(index, data), self.dtype).reshape(shape.tolist())

    def document(self, index: int) -> bytes | memoryview | Array:
        """Document `index`, fetched at once: for tests and small reads."""
        data = self._fetch.fetch([self.item(index)])[0]
        return self.array(index, data) if self.kind == "arrays" else self.decode(index, data)

    def damaged_documents(self, chunk: int) -> list[int]:
        """Numbers of the documents with a byte in chunk `chunk` of the file."""
        item = self._frame.chunk(chunk)
        touched = (self._starts < item.stop) & (self._starts + self._lengths > item.start)
        return [int(index) for index in np.flatnonzero(touched)]

    def verify(self) -> None:
        """Reads the whole shard; DataError names the first damaged document, or the range between documents."""
        for first in range(0, len(self), 256):
            self._fetch.fetch([self.item(index) for index in range(first, min(first + 256, len(self)))])
        for chunk in range(len(self._frame.footer["chunks"])):
            item = self._frame.chunk(chunk)
            data = self._fetch.fetch([Item(item.file, item.start, item.stop)])[0]
            if xxhash.xxh3_64_intdigest(data) != item.checksum:
                raise damaged(self.file, f"bytes {item.start} to {item.stop} are not what was written")


class _Texts:
    """A section of joined texts."""

    def __init__(self, index: Sections, name: str, offsets: str) -> None:
        self._bytes: npt.NDArray[np.uint8] = _present(index.array(name, "u1"))
        self._offsets: npt.NDArray[np.int64] = _present(index.array(offsets, "<i8"))

    def of(self, number: int) -> str:
        return self._bytes[self._offsets[number] : self._offsets[number + 1]].tobytes().decode()


@dataclass(slots=True)
class _Index:
    """What follows the documents, gathered one by one."""

    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    raw_lengths: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    notes: list[bytes] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def write(self, writer: FrameWriter, *, kind: Kind, compression: Compression) -> None:
        writer.section("starts", np.array(self.starts, "<i8"))
        writer.section("lengths", np.array(self.lengths, "<i8"))
        writer.section("hashes", np.array(self.hashes, "<u8"))
        writer.section("ids", np.array([document_key(name.decode()) for name in self.names], "<u8"))
        for section, offsets, texts in (("names", "name_offsets", self.names), ("notes", "note_offsets", self.notes)):
            writer.section(section, np.frombuffer(b"".join(texts), np.uint8))
            writer.section(offsets, np.cumsum([0, *map(len, texts)], dtype="<i8"))
        if kind == "bytes":
            writer.section("types", np.array(self.types, "<u2"))
        else:
            writer.section("shapes", np.array([size for shape in self.shapes for size in shape], "<i8"))
            writer.section("shape_offsets", np.cumsum([0, *map(len, self.shapes)], dtype="<i8"))
        if compression == "zstd":
            writer.section("raw_lengths", np.array(self.raw_lengths, "<i8"))


def _write(path: Path, documents: Iterable[Blob], *, kind: Kind, dtype: str, compression: Compression) -> WrittenBlobs:
    index = _Index()
    media_types: dict[str, int] = {}
    with committed_file(path) as file:
        writer = FrameWriter(file)
        for document in documents:
            raw, shape = _raw(document, path=path, kind=kind, dtype=dtype)
            stored = compress(raw) if compression == "zstd" else raw
            index.starts.append(writer.align())
            writer.write(stored)
            index.lengths.append(len(stored))
            index.raw_lengths.append(len(raw))
            index.hashes.append(xxhash.xxh3_64_intdigest(stored))
            index.names.append(document.name.encode())
            index.notes.append(b"" if document.note is None else json.dumps(document.note).encode())
            index.types.append(media_types.setdefault(document.media_type, len(media_types)))
            index.shapes.append(shape)
        writer.end_payload("documents")
        index.write(writer, kind=kind, compression=compression)
        checksum = writer.finish(
            kind=kind,
            dtype=dtype,
            documents=len(index.starts),
            compression=compression,
            media_types=list(media_types),
        )
        size = file.tell()
    return WrittenBlobs(len(index.starts), sum(index.raw_lengths), size, checksum)


def _raw(document: Blob, *, path: Path, kind: Kind, dtype: str) -> tuple[bytes | memoryview, tuple[int, ...]]:
    """The bytes of a document and, for an array, its shape."""
    data = document.data
    if kind == "bytes":
        if isinstance(data, np.ndarray):
            raise DataError(f"{path}: document {document.name} is an array; write it with write_arrays")
        return memoryview(data).cast("B"), ()
    array = np.asarray(data)
    if array.dtype != np.dtype(dtype):
        raise DataError(f"{path}: document {document.name} is of {array.dtype}, the shard of {dtype}; convert it first")
    return array.astype(np.dtype(dtype).newbyteorder("<")).tobytes(), array.shape


def _present(array: Array | None) -> Array:
    assert array is not None, "every shard of blobs has this section"
    return array
