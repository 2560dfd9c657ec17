"""Every change that checkpoints make to a disk goes through a `Disk`. No torch.

It is the place where a crash, a full disk or a flipped bit can be brought about on purpose: tests and `ropewalk chaos`
put one of their own in. Each call is one system call or nearly so; durability is the caller's affair.
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
    """A file being written, from its beginning."""

    def write(self, data: bytes | memoryview) -> None: ...

    def sync(self) -> None:
        """Returns when what was written is durable."""


class Disk(Protocol):
    """What a checkpoint asks of storage."""

    def create(self, path: Path) -> contextlib.AbstractContextManager[WritableFile]:
        """An empty file at `path`, in place of what was there."""
        ...

    def make_folder(self, path: Path) -> None:
        """Makes `path`, whose parent exists; content when it exists."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """`new` becomes what `old` was, in one instant."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Makes the names inside `path` durable."""
        ...

    def remove(self, path: Path) -> None:
        """Removes a file or a whole folder; content when there is none."""
        ...


class LocalDisk:
    """A file system of this machine, or one mounted on it."""

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
            # A single call writes at most 2 GiB, and may write less than asked.
            view = view[os.write(self._descriptor, view) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)


class WatchedDisk:
    """A disk that tells how long its slowest call under way has lasted: one that hangs never raises anything."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._began: dict[int, float] = {}

    def waiting_s(self) -> float:
        """Seconds that the call under way has lasted, 0 when there is none; from any thread."""
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
