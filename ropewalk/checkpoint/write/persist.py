"""Writes snapshots as checkpoints in a background thread, in order, while training continues."""

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
    """The outcome of one save."""

    step: int
    path: Path
    bytes: int
    blocked_s: float
    """Seconds that training was blocked."""
    copy_s: float
    persist_s: float
    """Seconds from the end of the copy until durable."""
    after_s: float = 0.0
    """Seconds for retention afterwards, which may verify checkpoints."""
    tasks_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by kind of task (copy, hash, pack, write, sync); threads overlap."""
    error: Exception | None = None
    """Why the save failed; None if it succeeded. A StorageError is a fault of the disk, any other a bug."""


@dataclass(frozen=True, slots=True)
class _SaveJob:
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
    """Writes snapshots in order. Errors are reported by `finished`, not raised, so that training continues."""

    def __init__(
        self,
        disk: Disk,
        *,
        threads: int = 1,
        pace: RateLimiter | None = None,
        policy: CompressionPolicy | None = None,
    ) -> None:
        """`threads`: that hash, compress and write."""
        self._disk, self._threads, self._pace, self._policy = disk, threads, pace, policy
        self._jobs: queue.SimpleQueue[_SaveJob | _Loan | None] = queue.SimpleQueue()
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
        """Queues a snapshot to be written in `folder`. In the background, `before` runs before writing (copies to
        faster
        tiers), and `after` when the checkpoint is durable; on ranks other than 0, when their own files are."""
        with self._idle:
            self._open += 1
        self._jobs.put(_SaveJob(folder, manifest, tokenizer, snapshot, attempt or Attempt(), before, after))

    def lend(self, snapshot: Snapshot, work: Callable[[], None], *, step: int) -> None:
        """Queues `work` to run in the background once the snapshot of `step` is copied; writes nothing, and reports
        only
        failures."""
        with self._idle:
            self._open += 1
        self._jobs.put(_Loan(step, snapshot, work))

    @property
    def idle(self) -> bool:
        """Whether no save is in progress."""
        with self._idle:
            return self._open == 0

    def finished(self) -> list[SaveResult]:
        """Saves that ended since the last call, in order."""
        found = []
        while not self._done.empty():
            saved, snapshot = self._done.get()
            # A blocking save blocks training until it is durable.
            found.append(dataclasses.replace(saved, blocked_s=snapshot.blocked_s))
        return found

    def hurry(self) -> None:
        """Removes the bandwidth limit from the next snapshot on."""
        self._pace = None

    def drain(self, *, timeout_s: float | None = None, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Waits until no save is in progress, or until the timeout or `give_up`; whether all saves ended."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._idle:
            while not self._idle.wait_for(lambda: self._open == 0, 0.05):
                if give_up() or (end is not None and time.monotonic() > end):
                    return False
        return True

    def close(self, *, give_up: Callable[[], bool] = lambda: False) -> None:
        """Finishes all saves and ends the thread; after `give_up`, the thread is abandoned."""
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

    def _persist(self, job: _SaveJob) -> SaveResult:
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
                write=lambda target: write_tensor_files(
                    target,
                    snapshot.parts,
                    tokenizer=job.tokenizer,
                    disk=self._disk,
                    attempt=job.attempt,
                    threads=self._threads,
                    pace=self._pace,
                    arrivals=snapshot.arrivals,
                    digests=snapshot.digests,
                    policy=self._policy,
                    report=tasks.update,
                ),
                disk=self._disk,
                attempt=job.attempt,
            )
            durable = time.perf_counter()
            with storage(f"deleting old checkpoints below {job.folder}"):
                job.after()
        except Exception as failure:  # reported by `finished`; training may continue
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
    """Runs the work; its failure, or None."""
    try:
        loan.snapshot.wait_copied()
        loan.work()
    except Exception as failure:  # reported by `finished`
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
