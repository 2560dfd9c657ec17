"""A folder that several processes fill together: a lease each, one count of bytes, claims on what is being made.

Every lock is an flock: the kernel frees it when its holder dies, so that nothing has to be cleaned up after a kill
before others can go on.

    lock      held for the instants in which the count changes or a name appears or goes
    members   held shared as long as a process uses the folder; who can have it alone tidies up
    used      the bytes that count against the quota, one int64
    claims/   one file for each name that somebody is making now

The folder belongs to one user: a real folder, mode 0700, even where anybody may make names, as in `/dev/shm`. Only
files with names of our own are ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ropewalk.base.files import storage
from ropewalk.base.private import open_private

_CLAIM = re.compile(r"(\d+-)?[0-9a-f]{16}")
_MOST_SLEEP_S = 0.01


class Claim:
    """The right to make one name; others wait for `release` or for our death."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the claim up; whoever waited looks for the name itself."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class SharedFolder:
    """The quota, the lease and the claims of a folder under `path`."""

    def __init__(
        self, path: Path, *, limit_bytes: int, tidy: Callable[[], int], setting: str = "load.cache.disk"
    ) -> None:
        """`tidy` is called when no other process uses the folder: it removes what a crash left behind and gives the
        bytes that are there. `setting` is where the user names the folder."""
        self.path = path
        self.limit_bytes = limit_bytes
        self._thread_lock = threading.Lock()
        os.close(open_private(path, setting=setting))
        with storage(f"opening the cache folder {path}"):
            (path / "claims").mkdir(exist_ok=True)
            self._lock, self._members, self._used = (
                os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                for name in ("lock", "members", "used")
            )
            with self.locked():
                if try_lock(self._members, fcntl.LOCK_EX):
                    for claim in (path / "claims").iterdir():
                        if _CLAIM.fullmatch(claim.name):
                            claim.unlink()
                    self.set_used(tidy())
                fcntl.flock(self._members, fcntl.LOCK_SH)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among all threads and processes; for microseconds, never around a fetch or a write of data."""
        with self._thread_lock:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the quota, over all processes."""
        return int.from_bytes(os.pread(self._used, 8, 0), "little")

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be taken; negative after the quota was lowered."""
        return self.limit_bytes - self.used_bytes

    def set_used(self, used: int) -> None:
        """Writes the count; only inside `locked`."""
        os.pwrite(self._used, max(used, 0).to_bytes(8, "little"), 0)

    def add(self, size: int) -> None:
        """Adds `size` (negative: gives back) to the count; only inside `locked`."""
        self.set_used(self.used_bytes + size)

    def claim(self, name: str) -> Claim | None:
        """The right to make `name`, None while another thread or process has it."""
        assert _CLAIM.fullmatch(name)
        path = self.path / "claims" / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if try_lock(descriptor, fcntl.LOCK_EX):
            # The one who had it may have removed the file between our open and our lock; then a new one counts.
            if _is_at(descriptor, path):
                return Claim(path, descriptor)
            os.close(descriptor)
            return self.claim(name)
        os.close(descriptor)
        return None

    def wait(self, name: str, *, patience_s: float) -> bool:
        """Waits until nobody has the claim on `name`; False when that takes longer than `patience_s`."""
        try:
            descriptor = os.open(self.path / "claims" / name, os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            return until(lambda: try_lock(descriptor, fcntl.LOCK_SH), patience_s=patience_s)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Gives the lease back."""
        for descriptor in (self._lock, self._members, self._used):
            os.close(descriptor)


def until(ready: Callable[[], bool], *, patience_s: float) -> bool:
    """Asks `ready` again and again, ever more rarely, up to a hundred times a second; False when time is up."""
    deadline = time.monotonic() + patience_s
    pause = 0.0002
    while not ready():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _MOST_SLEEP_S)
    return True


def is_locked(path: Path) -> bool:
    """Whether a living process holds the flock of `path`."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Takes the flock of `kind` if nobody is in the way."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all of `data`; one call of the system may write a part."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
