"""The checkpoints of a run: when one is due, which one it goes on from, which ones stay."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from ropewalk.base.errors import StorageError
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.disk import Disk, LocalDisk
from ropewalk.checkpoint.format import list_checkpoints, step_path
from ropewalk.checkpoint.frequency import Decision, Frequency
from ropewalk.checkpoint.layouts import written
from ropewalk.checkpoint.payload import Pace
from ropewalk.checkpoint.persist import Persister, Saved
from ropewalk.checkpoint.snapshot import Snapshot, Stager
from ropewalk.checkpoint.tensors import State, groups_of, load, load_newest, manifest_of, retain, save, set_aside


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
        disk: Disk | None = None,
    ) -> None:
        self._folder = run / "checkpoints"
        self._best = self._folder / "best"
        self._settings, self._warn = settings, warn
        self._disk = disk or LocalDisk()
        self._frequency = Frequency(overhead=settings.overhead, mtbf_hours=settings.mtbf_hours, ranks=ranks)
        self._decision = self._frequency.decide()
        self._saved_at = 0
        self._failures = 0
        self._stager: Stager | None = None
        self._persister: Persister | None = None
        self._copying: Snapshot | None = None

    def newest(self) -> tuple[Path | None, State | None]:
        """The newest whole checkpoint; nothing that came after it is left in its way."""
        self.settle()
        path, state, wrong = load_newest(self._folder)
        for message in wrong:
            self._warn(f"{message} (continuing from an older one)")
        if path:
            # Newer ones are damaged; left in place, retention would keep them and delete this one.
            found = list_checkpoints(self._folder)
            for newer in found[found.index(path) + 1 :]:
                set_aside(newer)
        for best in list_checkpoints(self._best):
            # To be made again; should it turn out otherwise this time, it would not be the best of this run.
            if best > step_path(self._best, state.step if state else 0):
                shutil.rmtree(best)
        self._saved_at = state.step if state else 0
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
        stager, persister = self._workers()
        self.fence()
        snapshot = self._copying = stager.take(parts)
        self._saved_at = state.step
        persister.submit(
            self._folder,
            manifest_of(state),
            snapshot,
            tokenizer=state.tokenizer,
            after=lambda: self.retain(best_step=best_step),
        )
        if self._settings.write == "blocking":
            start = time.perf_counter()
            persister.drain()
            snapshot.blocked_s += time.perf_counter() - start

    def fence(self) -> None:
        """Waits until the copy under way no longer needs the state."""
        if self._copying:
            self._copying.wait()
            self._copying = None

    def finished(self) -> list[Saved]:
        """Saves that have become durable, or failed, since the last call; StorageError when too many have failed."""
        found = self._persister.finished() if self._persister else []
        for saved in found:
            if saved.error is None:
                self._failures = 0
                self._frequency.saw_save(blocked_s=saved.blocked_s, persist_s=saved.persist_s)
                continue
            self._failures += 1
            left = self._settings.failures - self._failures
            if left < 0 or not isinstance(saved.error, StorageError):
                raise saved.error
            self._warn(f"step {saved.step} could not be saved: {saved.error} ({left} more may fail)")
        return found

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
        """Waits until nothing is under way."""
        self.fence()
        if self._persister:
            self._persister.drain()

    def close(self) -> None:
        """Finishes what is under way and ends the threads."""
        self.fence()
        if self._persister:
            self._persister.close()
        if self._stager:
            self._stager.close()

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
        settings = self._settings
        retain(self._folder, keep_last=settings.keep_last, keep_every=settings.keep_every_steps, disk=self._disk)
        newest = [path for path in list_checkpoints(self._best) if path >= step_path(self._best, best_step)]
        if newest:
            retain(self._best, keep_last=len(newest), disk=self._disk)

    def _workers(self) -> tuple[Stager, Persister]:
        if self._stager is None or self._persister is None:
            pace = Pace(self._settings.bytes_per_s) if self._settings.bytes_per_s else None
            self._stager = Stager(buffers=2 if self._settings.write == "background" else 1)
            self._persister = Persister(self._disk, pace=pace)
        return self._stager, self._persister
