"""Snapshots become checkpoints in the background, one after the other, while training goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.files import storage

from .commit import Attempt, commit
from .disk import Disk
from .format import CheckpointManifest
from .payload import Pace
from .snapshot import Snapshot
from .tensors import write_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """How one save went."""

    step: int
    path: Path
    bytes: int
    blocked_s: float
    """Seconds that training waited."""
    copy_s: float
    persist_s: float
    """Seconds from the end of the copy until it was durable."""
    error: Exception | None = None
    """Why it is not there; None when it is. A StorageError is the disk's fault; anything else is ours."""


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    manifest: CheckpointManifest
    tokenizer: bytes
    snapshot: Snapshot
    after: Callable[[], None]


class Persister:
    """Writes snapshots in the order they were taken; an error is told, not raised, so that training lives on."""

    def __init__(self, disk: Disk, *, attempt: Attempt | None = None, pace: Pace | None = None) -> None:
        self._disk, self._attempt, self._pace = disk, attempt or Attempt(), pace
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Saved] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 0
        self._thread = threading.Thread(target=self._work, name="persist", daemon=True)
        self._thread.start()

    def submit(
        self,
        folder: Path,
        manifest: CheckpointManifest,
        snapshot: Snapshot,
        *,
        tokenizer: bytes,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Has the snapshot written below `folder`; `after` runs in the background when it is durable (retention)."""
        with self._idle:
            self._open += 1
        self._jobs.put(_Job(folder, manifest, tokenizer, snapshot, after))

    def finished(self) -> list[Saved]:
        """What has ended since the last call, in order."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def drain(self, *, timeout_s: float | None = None) -> bool:
        """Waits until nothing is under way; whether that came to pass within the time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._open == 0, timeout_s)

    def close(self) -> None:
        """Finishes what is under way and ends the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._done.put(self._persist(job))
            finally:
                with self._idle:
                    self._open -= 1
                    self._idle.notify_all()

    def _persist(self, job: _Job) -> Saved:
        snapshot, path = job.snapshot, job.folder
        error: Exception | None = None
        start = time.perf_counter()
        try:
            snapshot.wait_copied()
            start = time.perf_counter()
            path = commit(
                job.folder,
                job.manifest,
                write=lambda place: write_parts(
                    place,
                    snapshot.parts,
                    tokenizer=job.tokenizer,
                    disk=self._disk,
                    attempt=self._attempt,
                    pace=self._pace,
                ),
                disk=self._disk,
                attempt=self._attempt,
            )
            with storage(f"deleting old checkpoints below {job.folder}"):
                job.after()
        except Exception as failure:  # told to whoever trains, who may go on
            error = failure
        finally:
            snapshot.release()
        size = sum(p.local.numel() * p.local.element_size() for parts in snapshot.parts.values() for p in parts)
        return Saved(
            step=job.manifest.step,
            path=path,
            bytes=size,
            blocked_s=snapshot.blocked_s,
            copy_s=snapshot.copy_s,
            persist_s=time.perf_counter() - start,
            error=error,
        )
