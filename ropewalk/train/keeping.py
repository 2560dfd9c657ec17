"""The checkpoints of a run: when one is due, which one it goes on from, which ones stay."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ropewalk.base.errors import StorageError
from ropewalk.checkpoint.commit import publish_newest
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.copier import Copied, Copier
from ropewalk.checkpoint.disk import Disk, LocalDisk, Watched
from ropewalk.checkpoint.format import CheckpointManifest, list_checkpoints, step_path
from ropewalk.checkpoint.frequency import Decision, Frequency
from ropewalk.checkpoint.layouts import Held, written
from ropewalk.checkpoint.packing import Packer
from ropewalk.checkpoint.payload import Pace
from ropewalk.checkpoint.persist import Persister, Saved
from ropewalk.checkpoint.prune import step_of
from ropewalk.checkpoint.restore import Report
from ropewalk.checkpoint.snapshot import Snapshot, Stager
from ropewalk.checkpoint.tensors import State, groups_of, load, load_newest, manifest_of, retain, save, set_aside
from ropewalk.config.ranks import Ranks


class Keeper:
    """`checkpoints/`, and `checkpoints/best/` for the best validations of a phase that may stop early.

    In the background, `save` begins a copy and returns; the state must not change before `fence`, and `finished` tells
    when a checkpoint is durable.
    """

    def __init__(
        self,
        run: Path,
        settings: Checkpoints,
        *,
        warn: Callable[[str], None],
        ranks: int = 1,
        place: Ranks | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._folder = run / "checkpoints"
        self._best = self._folder / "best"
        self._settings, self._warn = settings, warn
        self._disk = Watched(disk or LocalDisk())
        self._frequency = Frequency(overhead=settings.overhead, mtbf_hours=settings.mtbf_hours, ranks=ranks)
        self._decision = self._frequency.decide()
        self._saved_at = 0
        self._failures = 0
        self._given_up: list[Saved] = []
        self._persist_s = 0.0
        self._deadline: float | None = None
        self._stager: Stager | None = None
        self._persister: Persister | None = None
        self._copying: Snapshot | None = None
        tiers, every = settings.tiers, settings.keep_every_steps
        self._copier = Copier(tiers, self._folder, ranks=place, keep_every=every) if tiers.used else None
        self.found: Report | None = None
        """Where the state of the last `newest` came from, when there are copies elsewhere than on the disk."""

    def newest(self) -> tuple[Path | None, State | None]:
        """The newest whole checkpoint; nothing that came after it is left in its way."""
        self.settle()
        path, state, wrong = self._gathered(self._copier) if self._copier else load_newest(self._folder)
        for message in wrong:
            self._warn(f"{message} (continuing from an older one)")
        if path:
            # Newer ones are damaged; left in place, retention would keep them and delete this one.
            for newer in list_checkpoints(self._folder):
                if step_of(newer) > step_of(path):
                    set_aside(newer)
        for best in list_checkpoints(self._best):
            # To be made again; should it turn out otherwise this time, it would not be the best of this run.
            if best > step_path(self._best, state.step if state else 0):
                shutil.rmtree(best)
        for folder in (self._folder, self._best):
            publish_newest(self._disk, folder)
        self._saved_at = state.step if state else 0
        if self._copier and state and not self.holds(state.step):
            self._save_again(state)
        return path, state

    def due(self, step: int) -> bool:
        """Whether `step` is to be saved."""
        if self._settings.save_every == "steps":
            return step % self._settings.save_every_steps == 0
        return step - self._saved_at >= self._decision.steps

    def saw_step(self, seconds: float) -> None:
        """A step took so long; `auto` needs to know."""
        self._frequency.saw_step(seconds)

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of `step`."""
        return step_path(self._folder, step).exists()

    def save(self, state: State) -> None:
        """Begins a checkpoint; what it makes superfluous goes when it is durable."""
        best_step = state.validation.get("early_stop", {}).get("best_step", 0)
        parts = {group: list(written(tensors)) for group, tensors in groups_of(state).items()}
        stager, persister = self._workers(parts)
        self.fence()
        self._saved_at = state.step
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
            before=lambda: self._copy(manifest, snapshot, tokenizer=state.tokenizer),
            after=lambda: self._stored(state.step, best_step=best_step),
        )
        if self._settings.write == "blocking":
            start = time.perf_counter()
            if not persister.drain(give_up=self._is_stuck):
                self._give_up(state.step)
            snapshot.blocked_s += time.perf_counter() - start

    def copy_due(self, step: int) -> bool:
        """Whether `step` is to be kept in memory alone; not while a save is under way, which needs the buffers."""
        every = self._settings.tiers.memory_every_steps
        return bool(self._copier and every and step % every == 0 and (not self._persister or self._persister.idle))

    def copy(self, state: State) -> None:
        """Begins a copy to memory and to peers; the disk knows nothing of it."""
        parts = {group: list(written(tensors)) for group, tensors in groups_of(state).items()}
        stager, persister = self._workers(parts)
        self.fence()
        snapshot = self._copying = stager.take(parts, give_up=self._is_stuck)
        if snapshot:
            manifest = manifest_of(state)
            work = functools.partial(self._copy, manifest, snapshot, tokenizer=state.tokenizer)
            persister.lend(snapshot, work, step=state.step)

    def fence(self) -> None:
        """Waits until the copy under way no longer needs the state."""
        if self._copying:
            self._copying.wait()
            self._copying = None

    def finished(self) -> list[Saved]:
        """Saves that have become durable, or failed, since the last call; StorageError when too many have failed."""
        found = [*(self._persister.finished() if self._persister else []), *self._given_up]
        self._given_up = []
        for saved in found:
            if saved.error is None:
                self._failures = 0
                self._persist_s = saved.copy_s + saved.persist_s
                self._frequency.saw_save(blocked_s=saved.blocked_s, persist_s=saved.persist_s)
                continue
            self._failures += 1
            left = self._settings.failures - self._failures
            if left < 0 or not isinstance(saved.error, StorageError):
                raise saved.error
            self._warn(f"step {saved.step} could not be saved: {saved.error} ({left} more may fail)")
        return found

    def copied(self) -> list[Copied]:
        """Copies elsewhere than on the disk that have been made, or have failed, since the last call."""
        found = self._copier.finished() if self._copier else []
        for copy in found:
            if copy.error:
                self._warn(f"step {copy.step}: no copy in {copy.tier}: {copy.error}")
        return found

    def step_began(self) -> None:
        """A step begins; copies look for the gaps in its traffic."""
        if self._copier:
            self._copier.learner.step()

    def traffic(self) -> contextlib.AbstractContextManager[None]:
        """Training uses the network in this block."""
        return self._copier.learner.busy() if self._copier else contextlib.nullcontext()

    def decide(self) -> Decision | None:
        """The new interval of `auto`, when it has changed by a tenth or more; None otherwise."""
        if self._settings.save_every == "steps":
            return None
        new, old = self._frequency.decide(), self._decision
        if abs(new.steps - old.steps) < 0.1 * old.steps and new.bound == old.bound:
            return None
        self._decision = new
        return new

    def settle(self) -> None:
        """Waits until nothing is under way; StorageError when the disk hangs."""
        self.fence()
        if self._persister and not self._persister.drain(give_up=self._is_stuck):
            raise self._stuck()

    def hurry(self, seconds: float) -> bool:
        """From now on nobody waits longer than `seconds` altogether, and the disk is used in full; whether a save can
        be expected to become durable by then."""
        self._deadline = time.monotonic() + seconds
        if self._persister:
            self._persister.hurry()
        return self._persist_s < seconds

    def close(self) -> None:
        """Finishes what is under way and ends the threads; what hangs is left to itself."""
        self.fence()
        if self._persister:
            self._persister.close(give_up=self._is_stuck)
        if self._stager:
            self._stager.close()
        if self._copier:
            self._copier.close()

    def end(self) -> None:
        """The run has ended well: its copies in memory are no longer needed."""
        if self._copier:
            self.settle()
            self._copier.end()

    def save_best(self, state: State) -> None:
        """Commits the checkpoint of a best validation."""
        # The background deletes what it takes for leftovers.
        self.settle()
        save(self._best, state, disk=self._disk)

    def best_weights(self, step: int) -> Mapping[str, Tensor]:
        """The weights of the best validation, made at `step`."""
        return load(step_path(self._best, step), optimizer=False).model

    def retain(self, *, best_step: int = 0) -> None:
        """Keeps as many checkpoints as the settings say, and the best from that of `best_step` on. Also called at the
        start: a kill between a save and its retention leaves one checkpoint too many."""
        # A save that is under way looks like something that a crash left; it ends with its own retention.
        if not self._persister or self._persister.drain(timeout_s=0.0):
            self._retain(best_step=best_step)

    def _retain(self, *, best_step: int) -> None:
        settings = self._settings
        retain(
            self._folder,
            keep_last=settings.keep_last,
            keep_every=settings.keep_every_steps,
            in_use=self._copier.in_use if self._copier else (),
            disk=self._disk,
        )
        newest = [path for path in list_checkpoints(self._best) if path >= step_path(self._best, best_step)]
        if newest:
            retain(self._best, keep_last=len(newest), disk=self._disk)

    def _gathered(self, copier: Copier) -> tuple[Path | None, State | None, list[str]]:
        """The newest state of all places, as `load_newest` has that of the disk."""
        state, self.found = copier.restore()
        for message in self.found.unreachable:
            self._warn(message)
        return step_path(self._folder, state.step) if state else None, state, self.found.damaged

    def _save_again(self, state: State) -> None:
        """Makes a checkpoint of a state that came from elsewhere."""
        self.save(state)
        if state.phase_ended:
            # Nothing may follow that waits for it.
            self.settle()
            while not self.holds(state.step):
                # Each failure counts; the last one allowed raises.
                self.finished()
                self.save(state)
                self.settle()

    def _copy(self, manifest: CheckpointManifest, snapshot: Snapshot, *, tokenizer: bytes) -> None:
        if self._copier:
            parts = snapshot.parts
            size = sum(p.local.numel() * p.local.element_size() for group in parts.values() for p in group)
            self._copier.keep(
                manifest, parts, tokenizer=tokenizer, size=size + len(tokenizer), digests=snapshot.digests
            )

    def _stored(self, step: int, *, best_step: int) -> None:
        if self._copier:
            self._copier.stored(step_path(self._folder, step))
        self._retain(best_step=best_step)

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
        """Counts a save that found no buffer free, or waited for a disk that hangs, among those that failed."""
        path = step_path(self._folder, step)
        failed = Saved(step=step, path=path, bytes=0, blocked_s=0.0, copy_s=0.0, persist_s=0.0, error=self._stuck())
        self._given_up.append(failed)

    def _workers(self, parts: Mapping[str, Sequence[Held]]) -> tuple[Stager, Persister]:
        if self._stager is None or self._persister is None:
            pace = Pace(self._settings.bytes_per_s) if self._settings.bytes_per_s else None
            self._stager = Stager(buffers=2 if self._settings.write == "background" else 1)
            # Both buffers now: the first save is slow, the second is not.
            self._stager.prepare(parts)
            packer = Packer(self._settings.packing) if self._settings.packing != "off" else None
            self._persister = Persister(self._disk, pace=pace, packer=packer)
        return self._stager, self._persister
