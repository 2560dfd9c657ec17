"""Fault injection: disks that fail, fill up, slow down or hang, for `ropewalk chaos` and tests. No torch."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .disk import Disk, LocalDisk, WritableFile

Call = Literal["create", "write", "sync", "make_folder", "rename", "sync_folder", "remove"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault and when it occurs."""

    kind: Literal["error", "quota", "slow", "hang"]
    """`error`: calls fail with `code`. `quota`: writes fail with `code` after `bytes`. `slow`: a write takes `seconds`
    per
    4 MiB or part of them. `hang`: calls do not return."""
    code: int = errno.EIO
    on: tuple[Call, ...] = ("write",)
    """Calls that fail or hang."""
    after: int = 0
    """Number of these calls that succeed first."""
    times: int | None = None
    """Number of calls that then fail; None: all."""
    bytes: int = 0
    seconds: float = 0.0


class FaultyDisk:
    """A disk with an injected fault."""

    def __init__(self, fault: Fault, *, disk: Disk | None = None) -> None:
        self._fault, self._disk = fault, disk or LocalDisk()
        self._seen = 0
        self._written = 0
        self._lock = threading.Lock()
        self.healed = threading.Event()
        """Setting the event releases hanging calls."""

    @contextlib.contextmanager
    def create(self, path: Path) -> Iterator[WritableFile]:
        self.inject("create", path)
        with self._disk.create(path) as file:
            yield _FaultyFile(file, path, self)

    def make_folder(self, path: Path) -> None:
        self.inject("make_folder", path)
        self._disk.make_folder(path)

    def rename(self, old: Path, new: Path) -> None:
        self.inject("rename", old)
        self._disk.rename(old, new)

    def sync_folder(self, path: Path) -> None:
        self.inject("sync_folder", path)
        self._disk.sync_folder(path)

    def remove(self, path: Path) -> None:
        self.inject("remove", path)
        self._disk.remove(path)

    def inject(self, call: Call, path: Path, *, size: int = 0) -> None:
        """Applies the fault to a call."""
        fault = self._fault
        if fault.kind == "quota":
            with self._lock:
                self._written += size
                over = self._written > fault.bytes and call == "write"
            if over:
                _fail(fault.code, path)
            return
        if fault.kind == "slow":
            if call == "write":
                time.sleep(fault.seconds * max(1.0, size / (4 << 20)))
            return
        if call not in fault.on:
            return
        with self._lock:
            number = self._seen
            self._seen += 1
        if number < fault.after or (fault.times is not None and number >= fault.after + fault.times):
            return
        if fault.kind == "hang":
            self.healed.wait()
        else:
            _fail(fault.code, path)


class _FaultyFile:
    def __init__(self, file: WritableFile, path: Path, disk: FaultyDisk) -> None:
        self._file, self._path, self._disk = file, path, disk

    def write(self, data: bytes | memoryview) -> None:
        self._disk.inject("write", self._path, size=len(memoryview(data).cast("B")))
        self._file.write(data)

    def sync(self) -> None:
        self._disk.inject("sync", self._path)
        self._file.sync()


def _fail(code: int, path: Path) -> None:
    raise OSError(code, os.strerror(code), str(path))
