"""The checkpoints of a run: which one it goes on from, which ones stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from ropewalk.checkpoint.format import list_checkpoints, step_path
from ropewalk.checkpoint.tensors import State, load, load_newest, retain, save, set_aside


class Keeper:
    """`checkpoints/`, and `checkpoints/best/` for the best validations of a phase that may stop early."""

    def __init__(self, run: Path, *, keep_last: int, warn: Callable[[str], None]) -> None:
        self._folder = run / "checkpoints"
        self._best = self._folder / "best"
        self._keep_last, self._warn = keep_last, warn

    def newest(self) -> tuple[Path | None, State | None]:
        """The newest whole checkpoint; nothing that came after it is left in its way."""
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
        return path, state

    def holds(self, step: int) -> bool:
        """Whether there is a checkpoint of `step`."""
        return step_path(self._folder, step).exists()

    def save(self, state: State) -> Path:
        """Commits a checkpoint and lets go of what it makes superfluous."""
        path = save(self._folder, state)
        self.retain(best_step=state.validation.get("early_stop", {}).get("best_step", 0))
        return path

    def save_best(self, state: State) -> None:
        """Commits the checkpoint of a best validation."""
        save(self._best, state)

    def best_weights(self, step: int) -> Mapping[str, Tensor]:
        """The weights of the best validation, made at `step`."""
        return load(step_path(self._best, step), optimizer=False).model

    def retain(self, *, best_step: int = 0) -> None:
        """Keeps as many checkpoints as the settings say, and the best from that of `best_step` on. Also called at the
        start: a kill between a save and its retention leaves one checkpoint too many."""
        retain(self._folder, keep_last=self._keep_last)
        newest = [path for path in list_checkpoints(self._best) if path >= step_path(self._best, best_step)]
        if newest:
            retain(self._best, keep_last=len(newest))
