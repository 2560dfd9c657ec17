"""The frame that every shard of ours shares: payload first, sections of index behind it, then the checksums.

    offset 0      payload
    aligned 64    sections, each an array
    footer        JSON: format, kind, sections, xxh3-64 of every 1 MiB before the footer, and what the kind adds
    last 24 bytes footer length, xxh3-64 of the footer, magic

The footer's hash covers the chunk hashes, which cover everything else: it is the shard's checksum. A frame is read
from a local file or by ranges through a `Fetch`; either way nothing that is used goes unchecked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from ropewalk.base.errors import DamagedData, DamagedFile, DataError
from ropewalk.base.files import NO_FILE, check_regular, upgraded

from .items import Fetch, Item

FORMAT = 3
CHUNK_BYTES = 1 << 20
ALIGN = 64
_MAGIC = b"ROPEWALK"
_TRAILER = struct.Struct("<QQ8s")
_TAIL_BYTES = 1 << 16
"""Read at once from the end of a remote file: the footer of 3 GB fits, so that opening takes one request."""
_REMEDY = "restore it from a copy, or move it away and run `ropewalk prepare` with its recipe again"

Section = tuple[int, int]
"""First byte and the byte behind the last."""


class FrameWriter:
    """Writes through to a file and hashes every chunk of CHUNK_BYTES."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_64()
        self._chunks: list[int] = []
        self._sections: dict[str, list[int]] = {}
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

    def align(self) -> int:
        """Fills up to the next aligned place and returns it."""
        self.write(b"\0" * (-self.position % ALIGN))
        return self.position

    def end_payload(self, name: str) -> None:
        """Everything so far is section `name`."""
        self._sections[name] = [0, self.position]

    def section(self, name: str, array: npt.NDArray[Any]) -> None:
        start = self.align()
        self.write(np.ascontiguousarray(array).tobytes())
        self._sections[name] = [start, self.position]

    def finish(self, **told: Any) -> str:
        """Writes the footer with what the kind tells; the shard's checksum."""
        if self.position % CHUNK_BYTES:
            self._close_chunk()
        footer = {
            "format": FORMAT,
            **told,
            "sections": self._sections,
            "chunk_bytes": CHUNK_BYTES,
            "chunks": self._chunks,
        }
        body = json.dumps(footer, separators=(",", ":")).encode()
        checksum = xxhash.xxh3_64_intdigest(body)
        self._file.write(body + _TRAILER.pack(len(body), checksum, _MAGIC))
        return f"{checksum:016x}"

    def _close_chunk(self) -> None:
        self._chunks.append(self._hash.intdigest())
        self._hash = xxhash.xxh3_64()


@dataclass(frozen=True, slots=True)
class Frame:
    """What the end of a shard says of the rest."""

    file: str
    footer: dict[str, Any]
    end: int
    """Bytes before the footer."""
    checksum: str

    def section(self, name: str) -> Section | None:
        """Where a section lies, None when there is none."""
        found = self.footer["sections"].get(name)
        return None if found is None else (found[0], found[1])

    @property
    def chunk_bytes(self) -> int:
        return int(self.footer["chunk_bytes"])

    def chunk(self, number: int) -> Item:
        """Chunk `number` as an item with its hash."""
        start = number * self.chunk_bytes
        stop = min(start + self.chunk_bytes, self.end)
        return Item(self.file, start, stop, checksum=self.footer["chunks"][number])

    def chunks_of(self, start: int, stop: int) -> range:
        """Numbers of the chunks that hold bytes `start` to `stop` (exclusive)."""
        return range(start // self.chunk_bytes, -(-stop // self.chunk_bytes) if stop > start else 0)

    def damaged_chunks(self, data: npt.NDArray[np.uint8]) -> Iterable[int]:
        """Numbers of the chunks of the whole file `data` that are not what was written."""
        return (number for number in range(len(self.footer["chunks"])) if self.is_damaged(number, data))

    def is_damaged(self, number: int, data: npt.NDArray[np.uint8]) -> bool:
        """Whether chunk `number` of the whole file `data` is not what was written."""
        item = self.chunk(number)
        return xxhash.xxh3_64_intdigest(data[item.start : item.stop].data) != item.checksum

    def expect(self, checksum: str | None) -> None:
        """Raises DataError unless the checksum is the one that the manifest says."""
        if checksum is not None and checksum != self.checksum:
            raise damaged(self.file, f"its checksum is {self.checksum}, the manifest says {checksum}")


class Sections:
    """Sections of a frame fetched by ranges, each byte checked by its chunk's hash."""

    def __init__(self, frame: Frame, fetch: Fetch, names: Iterable[str]) -> None:
        found = [place for place in map(frame.section, names) if place is not None and place[1] > place[0]]
        self._frame = frame
        numbers = [frame.chunks_of(*place) for place in found]
        first = min((r.start for r in numbers), default=0)
        last = max((r.stop for r in numbers), default=0)
        self._start = first * frame.chunk_bytes
        self._data = b"".join(fetch.fetch([frame.chunk(number) for number in range(first, last)]))

    def array(self, name: str, dtype: str) -> npt.NDArray[Any] | None:
        """Section `name`, None when there is none."""
        place = self._frame.section(name)
        if place is None:
            return None
        if place[0] == place[1]:
            return np.zeros(0, dtype)
        view = memoryview(self._data)[place[0] - self._start : place[1] - self._start]
        return np.frombuffer(view, dtype)


def local_frame(path: Path, *, kinds: tuple[str, ...]) -> Frame:
    """The frame of a local file; DataError when it is none, is damaged or of another kind."""
    try:
        size = check_regular(path).st_size
        with open(path, "rb") as file:

            def read(start: int, stop: int) -> bytes:
                file.seek(start)
                return file.read(stop - start)

            return read_frame(str(path), size=size, read=read, kinds=kinds)
    except FileNotFoundError:
        raise DamagedData(f"{path}: this shard is missing", _REMEDY) from None
    except DamagedFile as error:
        raise error if isinstance(error, DamagedData) else damaged(str(path), NO_FILE) from None
    except PermissionError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; check its permissions") from None


def fetched_frame(file: str, *, fetch: Fetch, size: int, kinds: tuple[str, ...]) -> Frame:
    """The frame of a file of `size` bytes behind `fetch`."""

    def read(start: int, stop: int) -> bytes:
        return bytes(fetch.fetch([Item(file, start, stop)])[0])

    return read_frame(file, size=size, read=read, kinds=kinds)


def read_frame(file: str, *, size: int, read: Callable[[int, int], bytes], kinds: tuple[str, ...]) -> Frame:
    """The frame at the end of `size` bytes that `read` gives by (start, stop)."""
    if size < _TRAILER.size:
        raise damaged(file, f"it is only {size} bytes long")
    first = max(0, size - _TAIL_BYTES)
    tail = read(first, size)
    length, checksum, magic = _TRAILER.unpack(tail[-_TRAILER.size :])
    start = size - _TRAILER.size - length
    if magic != _MAGIC or start < 0:
        raise damaged(file, "it does not end as a shard ends")
    body = tail[start - first : -_TRAILER.size] if start >= first else read(start, size - _TRAILER.size)
    if xxhash.xxh3_64_intdigest(body) != checksum:
        raise damaged(file, "its footer is not what was written")
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        raise damaged(file, "its footer is no JSON") from None
    footer = upgraded(tree, path=Path(file), what="shard", current=FORMAT, upgrades={1: _from_1, 2: _from_2})
    if not _is_footer(footer):
        raise damaged(file, "its footer tells of something else than its sections and chunks")
    if footer["kind"] not in kinds:
        raise DamagedData(f"{file}: this shard holds {footer['kind']}, not {' or '.join(kinds)}")
    written = max(end for _, end in footer["sections"].values())
    if written != start:
        raise damaged(file, f"{start} bytes precede its footer, {written} were written")
    return Frame(file, footer, start, f"{checksum:016x}")


def _is_footer(footer: dict[str, Any]) -> bool:
    """Whether a footer tells of sections, and of chunks that cover them. Its hash tells damage, not the intent of
    whoever wrote it."""
    sections, size, chunks = (footer.get(name) for name in ("sections", "chunk_bytes", "chunks"))
    if not isinstance(footer.get("kind"), str) or not isinstance(sections, dict) or not sections:
        return False
    places = [place if isinstance(place, list) and len(place) == 2 else [-1, -1] for place in sections.values()]
    if not all(type(a) is type(b) is int and 0 <= a <= b for a, b in places):
        return False
    end = max(b for _, b in places)
    if type(size) is not int or size < 1 or not isinstance(chunks, list):
        return False
    return len(chunks) == -(-end // size) and all(type(chunk) is int for chunk in chunks)


def damaged(file: str, why: str) -> DamagedData:
    """The error of a shard that is not what was written."""
    return DamagedData(f"{file}: damaged shard: {why}", _REMEDY)


def _from_1(footer: dict[str, Any]) -> dict[str, Any]:
    """Format 2 adds sections that may be absent, and who made the tokens."""
    return {**footer, "encoder": ""}


def _from_2(footer: dict[str, Any]) -> dict[str, Any]:
    """Format 3 adds payloads in compressed blocks."""
    return {**footer, "compression": "off"}
