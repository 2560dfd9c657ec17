"""Snapshots become checkpoints in the background, one after the other, while training goes on."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.base.files import storage

from ..commit import Attempt, commit
from ..disk import Disk
from ..format import CheckpointManifest
from ..shard_compression import CompressionPolicy
from .save import write_tensor_files
from .shard_writer import RateLimiter
from .snapshot import Snapshot
from .task_graph import lower_priority


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveResult:
    """How one save went."""

    step: int
    path: Path
    bytes: int
    blocked_s: float
    """Seconds that training waited."""
    copy_s: float
    persist_s: float
    """Seconds from the end of the copy until it was durable."""
    after_s: float = 0.0
    """Seconds from then until what it made superfluous was gone, which may mean reading it back."""
    tasks_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by kind of task (copy, hash, pack, write, sync); on several threads they overlap."""
    error: Exception | None = None
    """Why it is not there; None when it is. A StorageError is the disk's fault; anything else is ours."""


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    manifest: CheckpointManifest
    tokenizer: bytes
    snapshot: Snapshot
    attempt: Attempt
    before: Callable[[], None]
    after: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Loan:
    step: int
    snapshot: Snapshot
    work: Callable[[], None]


class Persister:
    """Writes snapshots in the order they were taken; an error is told, not raised, so that training lives on."""

    def __init__(
        self,
        disk: Disk,
        *,
        threads: int = 1,
        pace: RateLimiter | None = None,
        packer: CompressionPolicy | None = None,
    ) -> None:
        """`threads`: that hash, pack and write at once."""
        self._disk, self._threads, self._pace, self._packer = disk, threads, pace, packer
        self._jobs: queue.SimpleQueue[_Job | _Loan | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[SaveResult, Snapshot]] = queue.SimpleQueue()
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
        attempt: Attempt | None = None,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Has the snapshot written below `folder`. In the background, `before` runs when nothing is written yet (faster
        copies), `after` when it is durable, or on ranks other than 0 when this rank's part is."""
        with self._idle:
            self._open += 1
        self._jobs.put(_Job(folder, manifest, tokenizer, snapshot, attempt or Attempt(), before, after))

    def lend(self, snapshot: Snapshot, work: Callable[[], None], *, step: int) -> None:
        """Has `work` done in the background when the snapshot of `step` is copied; nothing is written, and only a
        failure is told."""
        with self._idle:
            self._open += 1
        self._jobs.put(_Loan(step, snapshot, work))

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        with self._idle:
            return self._open == 0

    def finished(self) -> list[SaveResult]:
        """What has ended since the last call, in order."""
        found = []
        while not self._done.empty():
            saved, snapshot = self._done.get()
            # Training may have waited until just now: for a blocking save, until it was durable.
            found.append(dataclasses.replace(saved, blocked_s=snapshot.blocked_s))
        return found

    def hurry(self) -> None:
        """From the next snapshot on, writes as fast as the disk can."""
        self._pace = None

    def drain(self, *, timeout_s: float | None = None, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Waits until nothing is under way, the time is over or `give_up` says so; whether nothing is."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._idle:
            while not self._idle.wait_for(lambda: self._open == 0, 0.05):
                if give_up() or (end is not None and time.monotonic() > end):
                    return False
        return True

    def close(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Finishes what is under way and ends the thread; one that `give_up` says is lost is left to itself."""
        self._jobs.put(None)
        if self.drain(give_up=give_up):
            self._thread.join()

    def _work(self) -> None:
        lower_priority()
        while (job := self._jobs.get()) is not None:
            try:
                saved = _lend(job) if isinstance(job, _Loan) else self._persist(job)
                if saved:
                    self._done.put((saved, job.snapshot))
            finally:
                with self._idle:
                    self._open -= 1
                    self._idle.notify_all()

    def _persist(self, job: _Job) -> SaveResult:
        snapshot, path = job.snapshot, job.folder
        error: Exception | None = None
        start = time.perf_counter()
        durable = None
        tasks: dict[str, float] = {}
        try:
            job.before()
            start = time.perf_counter()
            path = commit(
                job.folder,
                job.manifest,
                write=lambda place: write_tensor_files(
                    place,
                    snapshot.parts,
                    tokenizer=job.tokenizer,
                    disk=self._disk,
                    attempt=job.attempt,
                    threads=self._threads,
                    pace=self._pace,
                    there=snapshot.there,
                    digests=snapshot.digests,
                    packer=self._packer,
                    tell=tasks.update,
                ),
                disk=self._disk,
                attempt=job.attempt,
            )
            durable = time.perf_counter()
            with storage(f"deleting old checkpoints below {job.folder}"):
                job.after()
        except Exception as failure:  # told to whoever trains, who may go on
            error = failure
        finally:
            snapshot.release()
        size = sum(part.bytes for parts in snapshot.parts.values() for part in parts)
        end = time.perf_counter()
        durable = durable or end
        tasks |= {"copy": snapshot.copy_s, "hash": snapshot.hash_s + tasks.get("hash", 0.0)}
        return SaveResult(
            step=job.manifest.step,
            path=path,
            bytes=size,
            blocked_s=snapshot.blocked_s,
            copy_s=snapshot.copy_s,
            persist_s=durable - max(start, snapshot.copied_at),
            after_s=end - durable,
            tasks_s=tasks,
            error=error,
        )


def _lend(loan: _Loan) -> SaveResult | None:
    """Does the work; how it failed, or nothing."""
    try:
        loan.snapshot.wait_copied()
        loan.work()
    except Exception as failure:  # told to whoever trains
        return SaveResult(
            step=loan.step,
            path=Path(),
            bytes=0,
            blocked_s=loan.snapshot.blocked_s,
            copy_s=loan.snapshot.copy_s,
            persist_s=0.0,
            error=failure,
        )
    finally:
        loan.snapshot.release()
    return None
