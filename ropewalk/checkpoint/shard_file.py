"""Shard files: safetensors files, hashed per chunk while writing and verified per chunk while reading. No torch.

A file is a header (8 bytes of length, JSON) and the tensors in sequence, as any safetensors reader expects. The
manifest has the xxh3-64 of every 4 MiB of the file, header included: a flipped bit is located to its chunk, and a
reader of one tensor verifies only the chunks it touches.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ropewalk.base.errors import DamagedCheckpoint
from ropewalk.base.files import point, storage
from ropewalk.base.untrusted import Refused, open_inside

from .disk import Disk
from .shard_compression import FRAME_BYTES, decompress

CHUNK_BYTES = 4 << 20
"""Large enough that the manifest of a terabyte has 2.6e5 hashes, small enough to read a single tensor. The hash runs at
about 20 GB/s per core, far above any disk."""

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's dtype names to those of safetensors."""


def item_bytes(dtype: str) -> int:
    """Bytes of an element of a dtype."""
    digits = "".join(filter(str.isdigit, CODES[dtype].split("_")[0]))
    return int(digits or 8) // 8


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    bytes: int
    chunks: tuple[str, ...]
    """xxh3-64, in hexadecimal, of every `chunk_bytes` of the stored file."""
    chunk_bytes: int = CHUNK_BYTES
    frames: tuple[int, ...] = ()
    """Of a compressed file: stored bytes of each frame. Offsets of tensors are those before compression."""
    frame_bytes: int = FRAME_BYTES
    """Bytes of each frame before compression, except the last."""


def layout(parts: Sequence[tuple[str, str, tuple[int, ...], int]]) -> tuple[bytes, list[int]]:
    """The header of a file of (name, dtype, shape, bytes) in this order, and the offset of each in the file."""
    tree: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, size in parts:
        tree[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    begins = [8 + len(text) + entry["data_offsets"][0] for entry in tree.values()]
    return len(text).to_bytes(8, "little") + text, begins


def write_shard_file(disk: Disk, path: Path, blocks: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes `blocks` as they are produced and waits until they are durable."""
    hashes = ChunkHasher()
    with disk.create(path) as file:
        for block in blocks:
            for piece in _slices(memoryview(block).cast("B")):
                file.write(piece)
                hashes.add(piece)
        point(f"checkpoint.written:{path.name}")
        file.sync()
    point(f"checkpoint.payload:{path.name}")
    return FileEntry(bytes=hashes.size, chunks=hashes.close(), chunk_bytes=CHUNK_BYTES)


class ChunkHasher:
    """Hashes a stream of bytes: xxh3-64 per CHUNK_BYTES."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes so far."""
        self._hash = xxhash.xxh3_64()
        self._done: list[str] = []

    def add(self, data: memoryview) -> None:
        """Adds the next bytes."""
        while data:
            left = CHUNK_BYTES - self.size % CHUNK_BYTES
            part, data = data[:left], data[left:]
            self._hash.update(part)
            self.size += len(part)
            if self.size % CHUNK_BYTES == 0:
                self._next()

    def close(self) -> tuple[str, ...]:
        """Ends the stream; the hash of each chunk, in order."""
        if self.size % CHUNK_BYTES:
            self._next()
        return tuple(self._done)

    def _next(self) -> None:
        self._done.append(self._hash.hexdigest())
        self._hash = xxhash.xxh3_64()


def digest(data: memoryview) -> str:
    """xxh3-64 of bytes in memory, in one call that releases the GIL."""
    return xxhash.xxh3_64_hexdigest(data)


def chunks_of(entry: FileEntry, begin: int, end: int) -> range:
    """Numbers of the chunks with bytes `begin` to `end` of the file before compression."""
    if begin == end:
        return range(0)
    if entry.frames:
        starts = list(itertools.accumulate(entry.frames, initial=0))
        begin, end = starts[begin // entry.frame_bytes], starts[-(-end // entry.frame_bytes)]
    return range(begin // entry.chunk_bytes, -(-end // entry.chunk_bytes))


class ShardFile:
    """A shard file open for reading, memory-mapped; returns only verified bytes."""

    def __init__(
        self,
        path: Path,
        entry: FileEntry,
        *,
        owners: Mapping[str, tuple[int, int]] | None = None,
        linked: bool = False,
    ) -> None:
        """`owners`: the byte range of each tensor, to name the tensors of a damaged chunk. `linked`: the path may be a
        link to any file, because we created it."""
        self._path, self._entry, self._owners = path, entry, owners or {}
        self._map: mmap.mmap | bytes = b""
        self._checked: set[int] = set()
        self._starts = list(itertools.accumulate(entry.frames, initial=0))
        self._last_frame: tuple[int, bytes] = (-1, b"")
        try:
            with (
                storage(f"reading {path}"),
                open(open_inside(path, roots=[Path("/")] if linked else ()), "rb") as file,
            ):
                size = os.fstat(file.fileno()).st_size
                if size != entry.bytes:
                    raise DamagedCheckpoint(f"{path}: damaged checkpoint: {size} bytes, {entry.bytes} were written")
                if size:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{path}: damaged checkpoint: this file is missing") from None
        except Refused as error:
            raise DamagedCheckpoint(f"{path}: damaged checkpoint: {error}") from None

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end`; DamagedCheckpoint if one of their chunks is damaged."""
        if not 0 <= begin <= end <= self._entry.bytes:
            raise DamagedCheckpoint(f"{self._path}: damaged checkpoint: bytes {begin} to {end} are not in this file")
        size = self._entry.chunk_bytes
        for number in range(begin // size, -(-end // size)):
            if number not in self._checked:
                wrong = self._wrong(number)
                if wrong:
                    raise DamagedCheckpoint(wrong)
                self._checked.add(number)
        return memoryview(self._map)[begin:end]

    def read_raw(self, begin: int, end: int) -> memoryview:
        """As `read`, of the file before compression."""
        if not self._entry.frames or begin == end:
            return self.read(begin, end)
        size = self._entry.frame_bytes
        parts = [self._frame(number) for number in range(begin // size, -(-end // size))]
        first = begin // size * size
        found = memoryview(parts[0] if len(parts) == 1 else b"".join(parts))[begin - first : end - first]
        if len(found) != end - begin:
            raise DamagedCheckpoint(f"{self._path}: damaged checkpoint: it unpacks to less than the manifest says")
        return found

    def release(self) -> None:
        """Returns the pages read so far to the system, so that resident memory does not grow with the file. Returned
        bytes stay readable."""
        if isinstance(self._map, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _frame(self, number: int) -> bytes:
        """A decompressed frame; the last one is cached, because tensors are read in order."""
        if self._last_frame[0] != number:
            stored = self.read(self._starts[number], self._starts[number + 1])
            self._last_frame = (number, self._decompress(stored, last=number + 1 == len(self._entry.frames)))
        return self._last_frame[1]

    def _decompress(self, stored: memoryview, *, last: bool) -> bytes:
        try:
            raw = decompress(stored, max_bytes=self._entry.frame_bytes)
        except ValueError as error:
            raise DamagedCheckpoint(f"{self._path}: damaged checkpoint: {error}") from None
        if len(raw) != self._entry.frame_bytes and not last:
            raise DamagedCheckpoint(f"{self._path}: damaged checkpoint: a frame of {len(raw)} bytes")
        return raw

    def problems(self, chunks: Iterable[int] | None = None) -> Iterator[str]:
        """The damage of the file by chunk: of `chunks`, or of all. A compressed file is then also decompressed in full,
        one frame at a time."""
        numbers = range(len(self._entry.chunks)) if chunks is None else chunks
        wrong = list(filter(None, map(self._wrong, numbers)))
        yield from wrong
        if chunks is None and not wrong:
            yield from self._frame_problems()

    def _frame_problems(self) -> Iterator[str]:
        needed = max((last for _, last in self._owners.values()), default=0)
        raw = 0
        try:
            for number in range(len(self._entry.frames)):
                raw += len(self._frame(number))
        except DamagedCheckpoint as error:
            yield str(error)
        else:
            if self._entry.frames and raw < needed:
                yield f"{self._path}: damaged checkpoint: it unpacks to {raw} bytes, its tensors need {needed}"

    def _wrong(self, number: int) -> str:
        size = self._entry.chunk_bytes
        begin, end = number * size, min((number + 1) * size, self._entry.bytes)
        with memoryview(self._map) as whole, whole[begin:end] as chunk:
            if xxhash.xxh3_64_hexdigest(chunk) == self._entry.chunks[number]:
                return ""
        hit = [name for name, place in self._owners.items() if self._touches(place, begin, end)]
        what = f" ({', '.join(hit[:4])}{' ...' if len(hit) > 4 else ''})" if hit else ""
        return f"{self._path}: damaged checkpoint: bytes {begin} to {end}{what} are not what was written"

    def _touches(self, place: tuple[int, int], begin: int, end: int) -> bool:
        """Whether stored bytes `begin` to `end` overlap the byte range `place` before compression."""
        first, last = place
        if self._entry.frames and first < last:
            size = self._entry.frame_bytes
            first, last = self._starts[first // size], self._starts[-(-last // size)]
        return first < end and last > begin


def _slices(data: memoryview) -> Iterator[memoryview]:
    """Slices that are hashed while still in the processor's cache."""
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
