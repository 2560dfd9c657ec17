"""Saves, finds, loads and retains the checkpoints of a run."""

from __future__ import annotations

import contextlib
import functools
import queue
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ropewalk.base.errors import StorageError
from ropewalk.base.files import PARTIAL
from ropewalk.checkpoint.commit import Attempt, publish_newest
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.coordinator import Alone, Coordinator, decided
from ropewalk.checkpoint.disk import Disk, LocalDisk, WatchedDisk
from ropewalk.checkpoint.format import CheckpointManifest, list_checkpoints, step_of, step_path
from ropewalk.checkpoint.policy.frequency import SaveDecision
from ropewalk.checkpoint.policy.retention import VerifiedCheckpoints, retain
from ropewalk.checkpoint.read.load import Check, CheckpointReader, LazyTensors, set_aside
from ropewalk.checkpoint.read.load_latest import Candidates, DiskCheckpoints, Search
from ropewalk.checkpoint.read.tiered_load import RestoreReport
from ropewalk.checkpoint.run_state import State, TensorShard, groups_of, manifest_of, shards_to_write
from ropewalk.checkpoint.shard_compression import CompressionPolicy
from ropewalk.checkpoint.tiers.tier import plain_name
from ropewalk.checkpoint.tiers.tier_writer import CopyResult, TierWriter, run_name
from ropewalk.checkpoint.write.persist import Persister, SaveResult
from ropewalk.checkpoint.write.save import save
from ropewalk.checkpoint.write.shard_writer import RateLimiter
from ropewalk.checkpoint.write.snapshot import Snapshot, Stager
from ropewalk.config.ranks import Ranks
from ropewalk.parallel.comm import Moment, Traffic
from ropewalk.parallel.placement import Choose

from .save_interval import Interval, Note


class Checkpointer:
    """Manages `checkpoints/`, and `checkpoints/best/` for the best validations of a phase with early stopping.

    With background writes, `save` starts a snapshot and returns; the state must not change before `fence`, and
    `finished` reports durable checkpoints.

    Every rank has one and calls it at the same steps. Each rank writes its own shards; rank 0 commits the checkpoint,
    chooses the one to resume from, and deletes. Only on rank 0 does `finished` mean durable.
    """

    def __init__(
        self,
        run: Path,
        settings: Checkpoints,
        *,
        warn: Callable[[str], None],
        ranks: int = 1,
        place: Ranks | None = None,
        attempt: str = "0",
        coordinator: Coordinator | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`attempt`: a launch name, equal on all ranks and unique among launches of the run; optional for one rank.
        `coordinator`: collectives of several ranks."""
        self._place, self._launch, self._coordinator = place or Ranks(), plain_name(attempt), coordinator or Alone()
        assert self._place.world == 1 or (coordinator and attempt != "0"), (
            "several ranks decide and name things together"
        )
        self._saves = 0
        self._damaged: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._verified = VerifiedCheckpoints(report=self._damaged.put)
        self._folder = run / "checkpoints"
        self._best = self._folder / "best"
        self._settings, self._warn = settings, warn
        self._disk = WatchedDisk(disk or LocalDisk())
        self.interval = Interval(
            run, settings, place=self._place, coordinator=self._coordinator, ranks=ranks, clock=clock
        )
        """Decides which steps to save."""
        self._clock = clock
        self._failures = 0
        self._spared: int | None = None
        self._untold: list[SaveResult] = []
        self._persist_s = 0.0
        self._deadline: float | None = None
        self._stager: Stager | None = None
        self._persister: Persister | None = None
        self._copying: Snapshot | None = None
        self._tier_writer = self._make_tier_writer() if settings.tiers.used else None
        self.found: RestoreReport | None = None
        """The source of the state loaded by the last `search`; None without other tiers than disk."""

    @contextlib.contextmanager
    def search(self, *, check: Check = lambda *_: None) -> Iterator[Search]:
        """Finds and loads the newest complete checkpoint, the same on every rank; skips those that `check` rejects.
        After the block, newer checkpoints are gone; `make_durable` saves a state loaded from another tier. All ranks
        must call."""
        self.settle()
        self.interval.begin(warn=self._warn)
        with contextlib.ExitStack() as stack:
            candidates: Candidates = DiskCheckpoints(self._folder, check=check)
            if self._tier_writer:
                candidates = tiers = stack.enter_context(self._tier_writer.candidates(check=check))
                self.found = tiers.report
            search = Search(candidates, self._coordinator, leads=self._leads)
            yield search
        for message in self.found.unreachable if self.found else ():
            self._warn(message)
        for message in search.wrong:
            self._warn(f"{message} (continuing from an older one)")
        step = search.state.step if search.state else 0
        if self._leads:
            self._remove_newer(step)
        self._coordinator.barrier()
        self.interval.saved_at = step

    def path(self, step: int) -> Path:
        """The path of the durable checkpoint of `step`."""
        return step_path(self._folder, step)

    def holds(self, step: int) -> bool:
        """Whether a checkpoint of `step` exists. All ranks must call."""
        return bool(self._decided(step_path(self._folder, step).exists))

    @property
    def prepared(self) -> bool:
        """Whether snapshot buffers are allocated or being allocated."""
        return self._stager is not None

    def prepare(self, state: State) -> Future[int]:
        """Starts allocating snapshot buffers for such a state, so that the first save does not wait for them; the
        future gives their bytes."""
        parts = self._parts(state)
        return self._workers(parts)[0].prepare(parts)

    def save(self, state: State, *, spent_s: float = 0.0) -> None:
        """Starts a checkpoint; retention runs when it is durable. `spent_s`: seconds training was already blocked to
        check the state."""
        began = self._clock()
        best_step = state.validation.get("early_stop", {}).get("best_step", 0)
        parts = self._parts(state)
        stager, persister = self._workers(parts)
        self.fence()
        self.interval.saved_at = state.step
        attempt = self._next_attempt()
        snapshot = self._copying = stager.take(parts, give_up=self._is_stuck)
        if snapshot is None:
            self._give_up(state.step)
            return
        manifest = manifest_of(state)
        persister.submit(
            self._folder,
            manifest,
            snapshot,
            tokenizer=state.tokenizer,
            attempt=attempt,
            # Not the state itself: the thread keeps its last job alive, and with it the memory of a finished phase.
            before=functools.partial(self._copy, manifest, snapshot, tokenizer=state.tokenizer),
            after=functools.partial(
                self._stored, state.step, save=self._saves, best_step=best_step, note=self.interval.note()
            ),
        )
        if self._settings.write == "blocking":
            start = time.perf_counter()
            if not persister.drain(give_up=self._is_stuck):
                self._give_up(state.step)
            snapshot.waited(time.perf_counter() - start)
        self.interval.saving(state.step, spent_s=spent_s + self._clock() - began, blocked_s=snapshot.blocked_s)

    def is_durable(self, step: int) -> bool:
        """Whether the state of `step` is on disk. All ranks must call."""
        return not self._tier_writer or self.holds(step)

    def make_durable(self, state: State) -> None:
        """Saves a state that was loaded from another tier, unless the disk has a checkpoint of its step. All ranks
        must call."""
        if self.is_durable(state.step):
            return
        self.save(state)
        if state.phase_ended:
            # No later step would wait for this save.
            self.settle()
            while not self.holds(state.step):
                # Each failure counts; the last one allowed raises.
                self.finished()
                self.save(state)
                self.settle()

    def copy_due(self, step: int) -> bool:
        """Whether to copy `step` to memory only; False while a save is in flight, which uses the buffers. All ranks
        must call."""
        every = self._settings.tiers.memory_every_steps
        if not self._tier_writer or not every or step % every:
            return False
        return self._coordinator.agree(not self._persister or self._persister.idle)

    def copy(self, state: State) -> None:
        """Starts a copy to memory and peers, not to disk."""
        parts = self._parts(state)
        stager, persister = self._workers(parts)
        self.fence()
        snapshot = self._copying = stager.take(parts, give_up=self._is_stuck)
        if snapshot:
            manifest = manifest_of(state)
            work = functools.partial(self._copy, manifest, snapshot, tokenizer=state.tokenizer)
            persister.lend(snapshot, work, step=state.step)

    def fence(self) -> None:
        """Waits until the copy in flight no longer needs the state; on a GPU, the current stream waits."""
        copying, self._copying = self._copying, None
        if copying:
            copying.wait()

    def finished(self) -> list[SaveResult]:
        """Saves that became durable or failed since the last call; StorageError after too many failures."""
        found = [*self._untold, *(self._persister.finished() if self._persister else [])]
        self._untold = []
        while not self._damaged.empty():
            self._warn(f"{self._damaged.get()} (an older one is kept in its place)")
        for message in self.interval.warnings():
            self._warn(message)
        for number, saved in enumerate(found):
            self.interval.saved(saved)
            if saved.error is None:
                self._failures = 0
                self._persist_s = saved.copy_s + saved.persist_s
                continue
            left = self._settings.failures - self._failures - 1
            if left < 0 or not isinstance(saved.error, StorageError):
                if number == 0:
                    raise saved.error
                # Earlier results are reported first.
                self._untold = found[number:]
                return found[:number]
            self._failures += 1
            self._warn(f"step {saved.step} could not be saved: {saved.error} ({left} more may fail)")
        return found

    def copied(self) -> list[CopyResult]:
        """Copies to other tiers that completed or failed since the last call."""
        found = self._tier_writer.finished() if self._tier_writer else []
        for copy in found:
            if copy.error:
                self._warn(f"step {copy.step}: no copy in {copy.tier}: {copy.error}")
        return found

    def step_began(self) -> None:
        """Marks the start of a step; copies use the gaps in its network traffic."""
        self.interval.step_began()
        if self._tier_writer:
            self._tier_writer.learner.step()

    def steps_settled(self) -> None:
        """Marks that the device has completed all steps so far."""
        self.interval.steps_settled(copying=self._persister is not None and not self._persister.idle)

    def traffic(self) -> contextlib.AbstractContextManager[None]:
        """Marks the block as training traffic on the network."""
        return self._tier_writer.learner.busy() if self._tier_writer else contextlib.nullcontext()

    def observe(self, traffic: Traffic, *, but: str) -> None:
        """Makes copies yield to the collectives of `traffic`, except group `but`: its collectives last whole steps but
        carry little data."""
        if not self._tier_writer:
            return
        learner = self._tier_writer.learner

        def began(group: str, at: float) -> None:
            if group != but:
                learner.begin_use(at)

        def saw(moment: Moment) -> None:
            if moment.group != but:
                learner.mark(moment.begin, moment.end)

        traffic.on_begin.append(began)
        traffic.observers.append(saw)

    def decide(self) -> SaveDecision | None:
        """The new interval of `auto` if it changed. All ranks must call."""
        return self.interval.decide()

    def settle(self) -> None:
        """Waits until nothing is in flight; StorageError if the disk hangs."""
        self.fence()
        if self._persister and not self._persister.drain(give_up=self._is_stuck):
            raise self._stuck()

    def hurry(self, seconds: float) -> bool:
        """Bounds all further waits to `seconds` in total and lifts the write rate limit; returns whether a save is
        expected to become durable by then. All ranks must call."""
        self._deadline = time.monotonic() + seconds
        if self._persister:
            self._persister.hurry()
        return self._coordinator.agree(self._persist_s < seconds)

    def close(self) -> None:
        """Completes work in flight and stops the threads; abandons a hanging save."""
        self.fence()
        if self._persister:
            self._persister.close(give_up=self._is_stuck)
        if self._stager:
            self._stager.close()
        if self._tier_writer:
            self._tier_writer.close()

    def end(self) -> None:
        """Frees the copies in memory after a successful run. All ranks must call."""
        if self._tier_writer:
            self.settle()
            self._tier_writer.settle()
            # Ranks of one host share that memory.
            self._coordinator.barrier()
            self._tier_writer.end()
        self.interval.stop()

    def save_best(self, state: State) -> None:
        """Commits the checkpoint of a best validation. All ranks must call."""
        # The background retention deletes partial folders it does not know.
        self.settle()
        save(self._best, state, disk=self._disk, attempt=self._next_attempt())
        # No rank may read it before it is committed.
        self._coordinator.barrier()

    def best_weights(self, step: int, wants: Choose | None = None) -> LazyTensors:
        """The weights of the best validation, saved at `step`, read lazily: this rank's shards (`wants`), or whole
        tensors."""
        return LazyTensors(CheckpointReader(step_path(self._best, step)), "model", wants)

    def spare(self, step: int | None) -> None:
        """Protects the checkpoint of `step` from retention until another one is protected."""
        self._spared = step

    def retain(self, *, best_step: int = 0) -> None:
        """Applies retention: keeps checkpoints per the settings, and best ones from `best_step` on. Also called at
        startup: a kill between a save and its retention leaves one checkpoint too many."""
        # A save in flight looks like a crash leftover; it runs its own retention.
        if self._leads and (not self._persister or self._persister.drain(timeout_s=0.0)):
            self._retain(best_step=best_step, save=0)

    def _retain(self, *, best_step: int, save: int) -> None:
        settings, is_left = self._settings, functools.partial(self._is_left, save=save)
        spared = [] if self._spared is None else [step_path(self._folder, self._spared)]
        retain(
            self._folder,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every_steps,
            keep_verified=settings.keep_verified,
            in_use=[*(self._tier_writer.in_use if self._tier_writer else ()), *spared],
            is_left=is_left,
            verified=self._verified,
            disk=self._disk,
        )
        newest = [path for path in list_checkpoints(self._best) if path >= step_path(self._best, best_step)]
        if newest:
            # The newest is read at early stopping; older ones are worse.
            retain(self._best, keep_last=len(newest), keep_verified=0, is_left=is_left, disk=self._disk)

    def _is_left(self, path: Path, *, save: int) -> bool:
        """Whether a partial folder is stale: from another launch, or from a save before number `save`. Other ranks may
        be ahead of this one."""
        launch, _, number = path.name.removesuffix(PARTIAL).partition(".")[2].rpartition("-")
        return self._place.world == 1 or launch != self._launch or int(number) < save

    @property
    def _leads(self) -> bool:
        """Whether this rank (0) decides and deletes."""
        return self._place.rank == 0

    def _decided(self, decide: Callable[[], Any]) -> Any:
        """The value that rank 0 computes. All ranks must call."""
        return decided(self._coordinator, decide, leads=self._leads)

    def _remove_newer(self, step: int) -> None:
        """Moves checkpoints newer than `step` aside and republishes the newest one."""
        if step:
            # Newer ones are damaged; retention would keep them and delete this one.
            for newer in list_checkpoints(self._folder):
                if step_of(newer) > step:
                    set_aside(newer)
        for best in list_checkpoints(self._best):
            # Best checkpoints after `step` are recomputed and may differ this time.
            if best > step_path(self._best, step):
                shutil.rmtree(best)
        for folder in (self._folder, self._best):
            publish_newest(self._disk, folder)

    def _copy(self, manifest: CheckpointManifest, snapshot: Snapshot, *, tokenizer: bytes) -> None:
        if self._tier_writer:
            snapshot.wait_copied()
            parts = snapshot.parts
            size = sum(part.bytes for group in parts.values() for part in group)
            self._tier_writer.keep(
                manifest, parts, tokenizer=tokenizer, size=size + len(tokenizer), digests=snapshot.digests
            )

    def _stored(self, step: int, *, save: int, best_step: int, note: Note) -> None:
        if not self._leads:
            return
        self.interval.keep(note)
        if self._tier_writer:
            self._tier_writer.stored(step_path(self._folder, step))
        self._retain(best_step=best_step, save=save)

    def _is_stuck(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        return late or self._disk.waiting_s() > self._settings.timeout_s

    def _stuck(self) -> StorageError:
        waited = self._disk.waiting_s()
        return StorageError(
            f"{self._folder}: the disk has not answered for {waited:.0f} s and what is being saved is not durable; "
            "check the storage. Older checkpoints are intact, the same command continues from them"
        )

    def _give_up(self, step: int) -> None:
        """Records a failed save: no free buffer, or a hanging disk."""
        path = step_path(self._folder, step)
        failed = SaveResult(
            step=step, path=path, bytes=0, blocked_s=0.0, copy_s=0.0, persist_s=0.0, error=self._stuck()
        )
        self._untold.append(failed)

    def _parts(self, state: State) -> dict[str, list[TensorShard]]:
        """The shards of each group that this rank writes."""
        rank = self._place.rank
        return {group: list(shards_to_write(tensors, rank=rank)) for group, tensors in groups_of(state).items()}

    def _next_attempt(self) -> Attempt:
        """The next save's name. Ranks save the same steps in the same order, so they agree on it, and an abandoned
        save has another one."""
        self._saves += 1
        place = self._place
        return Attempt(
            rank=place.rank,
            world=place.world,
            name=f"{self._launch}-{self._saves}",
            timeout_s=self._settings.timeout_s,
        )

    def _make_tier_writer(self) -> TierWriter:
        tiers = self._settings.tiers
        run = self._decided(lambda: run_name(tiers, self._folder))
        several = self._place.world > 1
        return TierWriter(
            tiers,
            self._folder,
            ranks=self._place,
            run=run,
            # A single rank generates a name unique among launches.
            attempt=self._launch if several else "",
            keep_every=self._settings.keep_every_steps,
        )

    def _workers(self, parts: Mapping[str, Sequence[TensorShard]]) -> tuple[Stager, Persister]:
        if self._stager is None or self._persister is None:
            pace = RateLimiter(self._settings.bytes_per_s) if self._settings.bytes_per_s else None
            self._stager = Stager(slots=2 if self._settings.write == "background" else 1)
            self._stager.prepare(parts)
            policy = CompressionPolicy(self._settings.compression) if self._settings.compression != "off" else None
            self._persister = Persister(self._disk, threads=self._settings.threads, pace=pace, policy=policy)
        return self._stager, self._persister
