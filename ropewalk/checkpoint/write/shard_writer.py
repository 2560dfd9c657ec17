"""A payload file as tasks: chunk by chunk it is packed, hashed and written, then synced. No torch.

    there ── pack ── hash ── write ── ... ── write ── sync
                      │        │
            the chunk before's hash and write

Chunks are packed in any order, on as many threads as there are. They are hashed and written in theirs: the place of a
packed chunk is known when those before it are, a file system lets one writer into a file at a time, and a crash leaves
a beginning of the file rather than holes. Other files go on meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.files import point

from .. import shard_compression, shard_file
from ..disk import Disk, WritableFile
from ..shard_file import ChunkHasher, FileEntry
from .task_graph import SaveTask, TaskGraph

BUFFER_BYTES = 64 << 20
"""Memory for packed chunks on their way to the disk: four at a time, more than threads that training can spare."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FileBlock:
    """Bytes of a file that belong together: a tensor's, or a header."""

    data: memoryview
    there: Future[None] | None = None
    """When they are; None: now."""
    check: Callable[[], None] = lambda: None
    """Called when they are written; raises when they are no longer what they should be."""


class ShardWriter:
    """A file that tasks write, `blocks` one after the other."""

    def __init__(
        self, disk: Disk, path: Path, blocks: Sequence[FileBlock], *, packed: int = 0, pace: RateLimiter | None = None
    ) -> None:
        """`packed`: as numbers of so many bytes; 0: as they are."""
        self._disk, self._path, self._blocks, self._item, self._pace = disk, path, blocks, packed, pace
        self._stored: dict[int, Sequence[bytes | memoryview]] = {}
        """What is to be written of each chunk."""
        self._hashes = ChunkHasher()
        self._frames: list[int] = []
        self._file: WritableFile | None = None
        self.began, self.ended = 0.0, 0.0
        """When the first byte was written, and when all were durable."""

    def add_to(self, graph: TaskGraph, opened: contextlib.ExitStack) -> None:
        """Adds the tasks; the file stays open as long as `opened` does."""
        written = graph.add("write", functools.partial(self._create, opened))
        hashed: list[SaveTask] = []
        for number, spans in enumerate(
            _cut(self._blocks, shard_compression.FRAME_BYTES if self._item else shard_file.CHUNK_BYTES)
        ):
            ready: list[SaveTask | Future[None]] = [block.there for block, _, _ in spans if block.there]
            views = [view for _, view, _ in spans]
            if self._item:
                # The chunk gathered, its planes, those with the numbers' rest, and the frame.
                pack = functools.partial(self._pack, number, views)
                ready = [graph.add("pack", pack, after=ready, holds=4 * shard_compression.FRAME_BYTES)]
            else:
                self._stored[number] = views
            hashed = [graph.add("hash", functools.partial(self._hash, number), after=[*ready, *hashed])]
            written = graph.add("write", functools.partial(self._write, number), after=[*ready, *hashed, written])
            for block, _, ends in spans:
                if ends:
                    graph.add("hash", block.check, after=[written])
        graph.add("sync", self._sync, after=[written])

    def close(self) -> FileEntry:
        """What the manifest says of it; for once, when its tasks are done."""
        chunks = self._hashes.close()
        frames = tuple(self._frames)
        return FileEntry(bytes=self._hashes.size, chunks=chunks, chunk_bytes=shard_file.CHUNK_BYTES, frames=frames)

    def _create(self, opened: contextlib.ExitStack) -> None:
        self._file = opened.enter_context(self._disk.create(self._path))

    def _pack(self, number: int, views: Sequence[memoryview]) -> None:
        raw = views[0] if len(views) == 1 else b"".join(views)
        self._stored[number] = [shard_compression.compress(raw, item=self._item)]

    def _hash(self, number: int) -> None:
        stored = self._stored[number]
        for data in stored:
            self._hashes.add(memoryview(data))
        if self._item:
            self._frames.append(sum(map(len, stored)))

    def _write(self, number: int) -> None:
        assert self._file
        self.began = self.began or time.perf_counter()
        for data in self._stored.pop(number):
            if self._pace:
                time.sleep(self._pace.delay(len(data)))
            self._file.write(data)

    def _sync(self) -> None:
        assert self._file
        point(f"checkpoint.written:{self._path.name}")
        self._file.sync()
        point(f"checkpoint.payload:{self._path.name}")
        self.ended = time.perf_counter()


class RateLimiter:
    """Lets bytes pass at most at a given rate, for storage that others use too; any number of threads may ask."""

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._due = clock()
        self._turn = threading.Lock()

    def delay(self, size: int) -> float:
        """Seconds to wait before the next `size` bytes."""
        with self._turn:
            now = self._clock()
            wait = max(0.0, self._due - now)
            self._due = max(self._due, now) + size / self._rate
        return wait


def _cut(blocks: Sequence[FileBlock], size: int) -> Iterator[list[tuple[FileBlock, memoryview, bool]]]:
    """What `blocks` hold, in chunks of `size` bytes: of each the parts of blocks, and whether a block ends there."""
    chunk: list[tuple[FileBlock, memoryview, bool]] = []
    room = size
    for block in blocks:
        left = block.data.cast("B")
        while left:
            part, left = left[:room], left[room:]
            chunk.append((block, part, not left))
            room -= len(part)
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk
