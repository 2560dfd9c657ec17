"""The folder in which jobs leave prepared items for each other, within a bound.

    staged/EPOCH-KEY    one byte a job: has it read this?; the xxh3 of the result; the result
    had/EPOCH-KEY       one byte a job, for what a job has prepared for itself alone
    jobs/NUMBER         locked by a job as long as it lives; the change it saw last in vain, the newest epoch it is in
    changes             how often something was staged, cleared or given back

A result goes when every job has read it. A job counts as having read what it will not ask for: when it is dead, or two
epochs further. An absent job is expected until `patience_s` after the area was opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import struct
import threading
import time
from pathlib import Path
from typing import Literal

import xxhash

from ropewalk.base.errors import RunConflict
from ropewalk.base.files import PARTIAL, point, storage
from ropewalk.base.private import open_private

from .folder import Claim, SharedFolder, is_locked, try_lock, until, write_all

_log = logging.getLogger(__name__)
_CHECKSUM = 8
_SEAT = struct.Struct("<qq")
_GOING = -1
_STAGED = re.compile(r"\d+-[0-9a-f]{16}(\.partial)?")
_SETTING = "load.cache.staging"


class Staging:
    """The area as one job sees it."""

    def __init__(self, folder: Path, *, job: int, jobs: int, budget_bytes: int, patience_s: float) -> None:
        assert 0 <= job < jobs
        self._job = job
        self._jobs = jobs
        self._expected_until = time.monotonic() + patience_s
        self._staged = folder / "staged"
        self._had = folder / "had"
        self._seats = folder / "jobs"
        os.close(open_private(folder, setting=_SETTING))
        with storage(f"opening {folder}"):
            for path in (self._staged, self._had, self._seats):
                path.mkdir(exist_ok=True)
        self._changes = os.open(folder / "changes", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._folder = SharedFolder(folder, limit_bytes=budget_bytes, tidy=self._clear, setting=_SETTING)
        self._lock = threading.Lock()
        self._looked: dict[int, int] = {}
        """For each thread that asks, the change after which it looked and could not go on."""
        self._newest_epoch = -1
        self._joined_epoch: int | None = None
        self._returned = (self._seats / str(job)).exists()
        self._seat = self._sit_down()

    @property
    def used_bytes(self) -> int:
        """Bytes staged, over all jobs."""
        return self._folder.used_bytes

    def begin(self, epoch: int) -> None:
        """A thread of this job asks for items of `epoch`."""
        with self._lock:
            self._looked[threading.get_ident()] = _GOING
            if self._joined_epoch is None:
                self._joined_epoch = epoch
            self._newest_epoch = max(self._newest_epoch, epoch)
            self._show()

    def end(self) -> None:
        """The thread has what it asked for."""
        with self._lock:
            del self._looked[threading.get_ident()]
            self._show()

    def take(self, name: str) -> memoryview | None:
        """The staged result, marked as read by this job; None when it is not there, or damaged and thrown away."""
        path = self._staged / name
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            size = os.fstat(descriptor).st_size
            content = memoryview(os.pread(descriptor, size, 0))
            checksum, data = content[self._jobs : self._jobs + _CHECKSUM], content[self._jobs + _CHECKSUM :]
            whole = len(content) == size and xxhash.xxh3_64_digest(data) == checksum
            with self._folder.locked():
                os.pwrite(descriptor, b"\1", self._job)
                if not whole or self._is_finished(name, os.pread(descriptor, self._jobs, 0)):
                    self._remove(path)
        finally:
            os.close(descriptor)
        if not whole:
            _log.warning("%s: not what was staged; the item is prepared again", path)
        return data if whole else None

    def claim(self, name: str) -> Claim | None:
        """The right to make `name`; None while another has it, or has just staged it."""
        claim = self._folder.claim(name)
        if claim is not None and (self._staged / name).exists():
            claim.release()
            return None
        return claim

    def put(self, name: str, data: bytes | memoryview) -> Literal["staged", "full", "unwanted"]:
        """Stages a result that this job has made; "unwanted" when no other job will read it or it can never fit."""
        size = self._jobs + _CHECKSUM + len(data)
        # A job that came back reads again what others are long past; staged, it would wait for them in vain.
        again = self._returned and _epoch_of(name) == self._joined_epoch
        if size > self._folder.limit_bytes or again:
            return "unwanted"
        partial = self._staged / (name + PARTIAL)
        with self._folder.locked():
            read = self._had_by(name)
            if self._is_finished(name, read):
                return "unwanted"
            if not self._reserve(partial, size):
                return "full"
        point("staging.reserved")
        try:
            with open(partial, "r+b", buffering=0) as file:
                write_all(file.fileno(), read + xxhash.xxh3_64_digest(data))
                write_all(file.fileno(), data)
        except OSError as error:
            _log.warning("%s: %s; the item is prepared by each job", partial, error)
            with self._folder.locked():
                self._remove(partial)
            return "unwanted"
        point("staging.written")
        with self._folder.locked():
            os.replace(partial, self._staged / name)
            (self._had / name).unlink(missing_ok=True)
            self._change()
        return "staged"

    def had(self, name: str) -> None:
        """Notes that this job has prepared `name` for itself: whoever stages it later need not wait for us."""
        with self._folder.locked():
            read = self._had_by(name)
            if not self._is_finished(name, read):
                (self._had / name).write_bytes(read)
            self._change()

    def release(self, claim: Claim) -> None:
        """Gives a claim back, for others to see."""
        claim.release()
        with self._folder.locked():
            self._change()

    @property
    def changes(self) -> int:
        """Grows with everything that may let a waiting job go on."""
        return int.from_bytes(os.pread(self._changes, 8, 0), "little")

    def looked(self, changes: int) -> None:
        """Shows the others that this thread cannot go on as things stand after so many `changes`."""
        with self._lock:
            self._looked[threading.get_ident()] = changes
            self._show()

    def going(self) -> None:
        """Shows the others that this thread goes on."""
        self.looked(_GOING)

    def is_stuck(self) -> bool:
        """Whether all jobs have looked since the last change and none can go on."""
        changes = self.changes
        return all(seat is None or seat[0] == changes for seat in map(self._seat_of, range(self._jobs)))

    def close(self) -> None:
        """Gives up the seat: the others need not wait for this job any more."""
        os.close(self._seat)
        os.close(self._changes)
        self._folder.close()

    def _sit_down(self) -> int:
        """Takes the seat of this job; the kernel frees its lock however the job ends."""
        path = self._seats / str(self._job)
        seat = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Who looks whether we live holds the lock for an instant; who lives holds it longer.
        if not until(lambda: try_lock(seat, fcntl.LOCK_EX), patience_s=0.5):
            os.close(seat)
            self._folder.close()
            raise RunConflict(
                f"{path}: another process is job {self._job} of {self._jobs} here; give each job a number of its own"
            )
        os.pwrite(seat, _SEAT.pack(_GOING, -1), 0)
        return seat

    def _show(self) -> None:
        """Tells the others how far this job is; a job goes on as long as one of its threads does."""
        os.pwrite(self._seat, _SEAT.pack(min(self._looked.values(), default=_GOING), self._newest_epoch), 0)

    def _change(self) -> None:
        """Counts a change; inside the lock."""
        os.pwrite(self._changes, (self.changes + 1).to_bytes(8, "little"), 0)

    def _seat_of(self, job: int) -> tuple[int, int] | None:
        """The change that a job saw last in vain and its newest epoch; None when it is gone and not expected."""
        path = self._seats / str(job)
        if not path.exists():
            return (_GOING, -1) if time.monotonic() < self._expected_until else None
        if job != self._job and not is_locked(path):
            return None
        shown = path.read_bytes()
        looked, epoch = _SEAT.unpack(shown) if len(shown) == _SEAT.size else (_GOING, -1)
        return looked, epoch

    def _is_finished(self, name: str, read: bytes) -> bool:
        """Whether no job will ask for `name` again."""
        for job, done in enumerate(read):
            seat = None if done else self._seat_of(job)
            if seat is not None and seat[1] <= _epoch_of(name) + 1:
                return False
        return True

    def _had_by(self, name: str) -> bytes:
        """One byte a job: who has read or made `name`, this job included; inside the lock."""
        path = self._had / name
        noted = path.read_bytes() if path.exists() else bytes(self._jobs)
        return bytes(done or number == self._job for number, done in enumerate(noted))

    def _reserve(self, partial: Path, size: int) -> bool:
        """Takes `size` bytes as a file of that size, so that they can be counted wherever this process may die."""
        if self._folder.free_bytes < size:
            self._release_finished()
        if self._folder.free_bytes < size:
            return False
        with open(partial, "wb") as file:
            file.truncate(size)
        self._folder.add(size)
        return True

    def _release_finished(self) -> None:
        """Clears away what no job will read, and what a dead one was writing; inside the lock."""
        for path in filter(_is_ours, self._staged.iterdir()):
            if path.name.endswith(PARTIAL):
                gone = not is_locked(self._folder.path / "claims" / path.name.removesuffix(PARTIAL))
            else:
                with open(path, "rb") as file:
                    gone = self._is_finished(path.name, file.read(self._jobs))
            if gone:
                self._remove(path)
        for path in filter(_is_ours, self._had.iterdir()):
            if self._is_finished(path.name, path.read_bytes()):
                path.unlink()

    def _remove(self, path: Path) -> None:
        """Removes a file and its bytes from the count; inside the lock."""
        with contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            self._folder.add(-size)
            self._change()

    def _clear(self) -> int:
        """A new set of jobs begins with an empty area."""
        for path in (*self._staged.iterdir(), *self._had.iterdir()):
            if _is_ours(path):
                path.unlink()
        for path in self._seats.iterdir():
            if path.name.isdecimal():
                path.unlink()
        return 0


def _is_ours(path: Path) -> bool:
    return bool(_STAGED.fullmatch(path.name))


def _epoch_of(name: str) -> int:
    return int(name.split("-")[0])
