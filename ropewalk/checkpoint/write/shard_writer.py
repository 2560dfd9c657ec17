"""Writes a shard file as a graph of tasks per chunk: compress, hash, write, and a final sync. No torch.

    copied ── pack ── hash ── write ── ... ── write ── sync
                       │        │
         hash and write of the previous chunk

Chunks are compressed in any order on all threads, but hashed and written in sequence: the offset of a compressed chunk
depends on those before it, a file system allows one writer per file at a time, and after a crash the file is a prefix
without holes. Files are written concurrently.
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

IN_FLIGHT_BYTES = 64 << 20
"""Memory for compressed chunks in flight: four of them, enough for the threads that training can spare."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FileBlock:
    """A contiguous part of a file: a tensor or the header."""

    data: memoryview
    arrival: Future[None] | None = None
    """Completes when the bytes are available; None: now."""
    check: Callable[[], None] = lambda: None
    """Called after the bytes are written; raises if they have changed."""


class ShardWriter:
    """Writes `blocks` in sequence into a file, by tasks."""

    def __init__(
        self, disk: Disk, path: Path, blocks: Sequence[FileBlock], *, item: int = 0, pace: RateLimiter | None = None
    ) -> None:
        """`item`: compress as elements of this many bytes; 0: no compression."""
        self._disk, self._path, self._blocks, self._item, self._pace = disk, path, blocks, item, pace
        self._stored: dict[int, Sequence[bytes | memoryview]] = {}
        """Bytes to write, by chunk."""
        self._hashes = ChunkHasher()
        self._frames: list[int] = []
        self._file: WritableFile | None = None
        self.began, self.ended = 0.0, 0.0
        """Times of the first write and of durability."""

    def add_to(self, graph: TaskGraph, opened: contextlib.ExitStack) -> None:
        """Adds the tasks to a graph; `opened` closes the file."""
        written = graph.add("write", functools.partial(self._create, opened))
        hashed: list[SaveTask] = []
        for number, spans in enumerate(
            _chunks(self._blocks, shard_compression.FRAME_BYTES if self._item else shard_file.CHUNK_BYTES)
        ):
            ready: list[SaveTask | Future[None]] = [block.arrival for block, _, _ in spans if block.arrival]
            views = [view for _, view, _ in spans]
            if self._item:
                # Memory: the gathered chunk, its planes, the planes with the remainder, and the frame.
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
        """The manifest entry, after all tasks are done; call once."""
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
    """Limits the bandwidth on shared storage. Thread-safe."""

    def __init__(self, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._due = clock()
        self._turn = threading.Lock()

    def delay(self, size: int) -> float:
        """Seconds to wait before sending the next `size` bytes."""
        with self._turn:
            now = self._clock()
            wait = max(0.0, self._due - now)
            self._due = max(self._due, now) + size / self._rate
        return wait


def _chunks(blocks: Sequence[FileBlock], size: int) -> Iterator[list[tuple[FileBlock, memoryview, bool]]]:
    """The blocks in chunks of `size` bytes; each chunk lists block, bytes, and whether the block ends."""
    chunk: list[tuple[FileBlock, memoryview, bool]] = []
    left_bytes = size
    for block in blocks:
        left = block.data.cast("B")
        while left:
            part, left = left[:left_bytes], left[left_bytes:]
            chunk.append((block, part, not left))
            left_bytes -= len(part)
            if not left_bytes:
                yield chunk
                chunk, left_bytes = [], size
    if chunk:
        yield chunk
