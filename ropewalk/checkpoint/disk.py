"""`Disk`: all writes of checkpoints to storage. No torch.

Tests and `ropewalk chaos` substitute disks that crash, fill up or flip bits. A call is about one system call; callers
ensure durability.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class WritableFile(Protocol):
    """A file open for sequential writing."""

    def write(self, data: bytes | memoryview) -> None: ...

    def sync(self) -> None:
        """Returns when the written bytes are durable (fsync)."""


class Disk(Protocol):
    """The storage operations of checkpoints."""

    def create(self, path: Path) -> contextlib.AbstractContextManager[WritableFile]:
        """Creates an empty file at `path`, or truncates it."""
        ...

    def make_folder(self, path: Path) -> None:
        """Creates `path`, whose parent exists; no error if it exists."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Renames atomically; replaces `new`."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Makes the names in `path` durable."""
        ...

    def remove(self, path: Path) -> None:
        """Removes a file or folder; no error if there is none."""
        ...


class LocalDisk:
    """A local or mounted file system."""

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[WritableFile]:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            yield _OpenFile(descriptor)
        finally:
            os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class _OpenFile:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        while view:
            # A call writes at most 2 GiB, possibly less than requested.
            view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)


class WatchedDisk:
    """Measures the duration of calls in progress, because a disk that hangs raises no error."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._began: dict[int, float] = {}

    def waiting_s(self) -> float:
        """Duration of the longest call in progress; 0 if there is none. Thread-safe."""
        now = time.monotonic()
        return max((now - began for began in list(self._began.values())), default=0.0)

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[WritableFile]:
        with contextlib.ExitStack() as stack:
            with self._call():
                file = stack.enter_context(self._disk.create(path))
            yield _WatchedFile(file, self)

    def make_folder(self, path: Path) -> None:
        with self._call():
            self._disk.make_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        with self._call():
            self._disk.rename(old, new)

    def sync_folder(self, path: Path) -> None:
        with self._call():
            self._disk.sync_folder(path)

    def remove(self, path: Path) -> None:
        with self._call():
            self._disk.remove(path)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._began[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._began[thread]


class _WatchedFile:
    def __init__(self, file: WritableFile, disk: WatchedDisk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: bytes | memoryview) -> None:
        with self._disk._call():
            self._file.write(data)

    def sync(self) -> None:
        with self._disk._call():
            self._file.sync()
