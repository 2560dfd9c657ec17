"""Optimizer state on a fast disk: memory-mapped files, read into a few buffers at a time.

The files are unlinked and vanish with the process; checkpoints hold what must persist.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ropewalk.base.errors import storage_error

PAGE = mmap.ALLOCATIONGRANULARITY


@dataclass(frozen=True, slots=True)
class _Place:
    """Byte offset, dtype and shape of a tensor in a file."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        """Returns the tensor as a view of `flat`, a copy of the whole file."""
        size = math.prod(self.shape) * self.dtype.itemsize
        return flat[self.offset : self.offset + size].view(self.dtype).view(self.shape)


@dataclass(slots=True)
class _File:
    file: IO[bytes]
    places: list[_Place] = field(default_factory=list)
    size: int = 0
    read: Future[Tensor] | None = None
    buffer: Tensor | None = None
    written: Future[None] | None = None


class StateFiles:
    """Units of tensors, one file per unit in `folder`, with at most `buffers` units in memory.

    One thread reads and one writes: with three buffers, a unit is read, one updated and one written at the same time.
    Take units in the order in which their reads were started. No thread blocks on a buffer, so that a process can exit
    at any point.
    """

    def __init__(self, folder: Path, *, buffers: int = 3, pinned: bool = False) -> None:
        self._folder, self._count, self._pinned = folder, buffers, pinned
        self._files: dict[int, _File] = {}
        self._waiting: deque[tuple[_File, Future[Tensor]]] = deque()
        self._free: list[Tensor] = []
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="state-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="state-write")
        self.memory_bytes = 0
        """Total size of the buffers."""

    def add(self, unit: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Appends tensors to a unit and returns them as views of the file. Reading a view pages in only its own pages,
        which the system may evict at any time; writing to it changes the file."""
        assert not self.memory_bytes, "units are complete before the first is read"
        file = self._files.setdefault(unit, _File(self._make_file()))
        begin, places = file.size, []
        for tensor in tensors:
            places.append(_Place(file.size, tensor.dtype, tensor.shape))
            # Page-aligned: any dtype may follow, and mappings begin at a page.
            file.size += -(-tensor.nbytes // PAGE) * PAGE
        file.places += places
        if file.size == begin:
            return [torch.empty(place.shape, dtype=place.dtype) for place in places]
        try:
            # Allocate now, rather than get SIGBUS when a mapped page finds no space.
            os.posix_fallocate(file.file.fileno(), begin, file.size - begin)
        except OSError as error:
            raise storage_error(error, doing=f"{self._folder}: optimizer state does not fit") or error from None
        mapping = mmap.mmap(file.file.fileno(), file.size - begin, offset=begin)
        mapped = torch.frombuffer(mapping, dtype=torch.uint8)
        views = [_Place(place.offset - begin, place.dtype, place.shape).of(mapped) for place in places]
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        # Drops the pages from this process's memory; they stay in the file.
        mapping.madvise(mmap.MADV_DONTNEED)
        return views

    def start_read(self, unit: int) -> None:
        """Queues a read of a unit, which starts when a buffer is free."""
        if not self.memory_bytes:
            self._make_buffers()
        file = self._files[unit]
        assert file.read is None, "it is being read"
        file.read = Future()
        self._waiting.append((file, file.read))
        self._serve()

    def take(self, unit: int) -> list[Tensor]:
        """Returns the tensors of a unit in memory, in the order of `add`."""
        file = self._files[unit]
        assert file.read is not None, "its reading was not started"
        file.buffer, file.read = file.read.result(), None
        return [place.of(file.buffer) for place in file.places]

    def start_write(self, unit: int) -> None:
        """Starts to write a taken unit back; its tensors must not be touched any more."""
        file = self._files[unit]
        assert file.buffer is not None, "nothing was taken"
        file.written = self._writer.submit(self._write, file, file.buffer)
        file.buffer = None

    def drop(self, unit: int) -> None:
        """Frees the buffer of a taken unit without writing."""
        file = self._files[unit]
        if file.buffer is not None:
            self._give_back(file.buffer)
            file.buffer = None

    def settle(self) -> None:
        """Waits until all units are written."""
        for file in self._files.values():
            if file.written:
                file.written.result()
                file.written = None

    def close(self) -> None:
        """Stops the threads and deletes the files."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        for file in self._files.values():
            file.file.close()

    def _make_file(self) -> IO[bytes]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            raise storage_error(error, doing=f"{self._folder}: optimizer state cannot be kept") or error from None

    def _make_buffers(self) -> None:
        largest = max(file.size for file in self._files.values())
        for _ in range(min(self._count, len(self._files))):
            self._free.append(torch.empty(largest, dtype=torch.uint8, pin_memory=self._pinned))
        self.memory_bytes = largest * len(self._free)

    def _give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)
        self._serve()

    def _serve(self) -> None:
        """Starts queued reads in order while buffers are free."""
        with self._lock:
            while self._waiting and self._free:
                self._reader.submit(self._read, *self._waiting.popleft(), self._free.pop())

    def _read(self, file: _File, reading: Future[Tensor], buffer: Tensor) -> None:
        view, offset = _bytes(buffer, file.size), 0
        try:
            while view:
                done = os.preadv(file.file.fileno(), [view], offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            self._give_back(buffer)
            reading.set_exception(storage_error(error, doing=f"{self._folder}: reading optimizer state") or error)
            return
        reading.set_result(buffer)

    def _write(self, file: _File, buffer: Tensor) -> None:
        view, offset = _bytes(buffer, file.size), 0
        try:
            while view:
                done = os.pwrite(file.file.fileno(), view, offset)
                view, offset = view[done:], offset + done
        except OSError as error:
            raise storage_error(error, doing=f"{self._folder}: writing optimizer state") or error from None
        finally:
            self._give_back(buffer)


def _bytes(buffer: Tensor, size: int) -> memoryview:
    return buffer.numpy().data[:size]
