"""The way of a run through its phases: where it stands, what comes next, where it goes back to."""

from __future__ import annotations

from pathlib import Path

import torch

from ropewalk.base.errors import RunConflict
from ropewalk.checkpoint.tensors import State
from ropewalk.load.stalls import Stalls
from ropewalk.parallel.executor import Points
from ropewalk.parallel.mesh import Mesh

from .keeping import Keeper
from .phase import Position, Running
from .settings import Settings


class Course:
    """How far a run has come, and the phase that is at work."""

    def __init__(
        self,
        settings: Settings,
        keeper: Keeper,
        *,
        device: torch.device,
        points: Points,
        stalls: Stalls,
        mesh: Mesh | None = None,
    ) -> None:
        self._settings, self._keeper, self._device, self._points = settings, keeper, device, points
        self._stalls, self._mesh = stalls, mesh
        # Every phase reads the same files: once is enough.
        self._verifies = settings.load.verify == "open"
        self.at = Position()
        self.running: Running | None = None
        """None when the last phase is over."""

    def restore(self) -> Path | None:
        """Takes over the newest whole checkpoint and returns its path, or begins the first phase."""
        path, state = self._keeper.newest()
        if state is None:
            self.at = Position()
            self._open(0)
            return None
        self._check_is_ours(state, path)
        self.at = Position(state.phase, state.phase_step, state.step, state.tokens)
        if state.phase_ended:
            self._open(state.phase + 1, before=state)
        else:
            self._open(state.phase, inside=state)
        return path

    def advance(self) -> None:
        """Goes on to the phase after the one that is over, whose checkpoint is durable."""
        if self._mesh and self._mesh.world.size > 1:
            # No rank has the whole state but on the disk.
            _, before = self._keeper.newest()
        else:
            before = self.state(ended=True)
        self._open(self.at.phase + 1, before=before)

    def state(self, *, ended: bool = False) -> State:
        """All that the run needs to go on from here; `ended` when its phase is over."""
        assert self.running, "no phase is at work"
        return self.running.state(self.at, seed=self._settings.seed, ended=ended)

    def close(self) -> None:
        """Stops the reading thread."""
        if self.running:
            self.running.close()
            self.running = None

    def _open(self, index: int, *, before: State | None = None, inside: State | None = None) -> None:
        """Makes phase `index` ready: after the one `before`, or `inside` where a checkpoint left it."""
        self.close()
        if index == len(self._settings.phases):
            return
        running = Running(
            self._settings,
            index,
            device=self._device,
            points=self._points,
            verify=self._verifies,
            stalls=self._stalls,
            mesh=self._mesh,
        )
        # What is to be skipped has to be known by every phase.
        self._verifies = self._verifies and self._settings.load.on_damage == "skip"
        self.running = running
        if inside:
            running.resume(inside)
        else:
            self.at.phase, self.at.phase_step = index, 0
            running.begin(before)

    def _check_is_ours(self, state: State, path: Path | None) -> None:
        settings = self._settings
        known = state.phase < len(settings.phases) and state.spec == settings.model(state.phase)
        if not known or state.seed != settings.seed:
            raise RunConflict(f"{path}: this checkpoint is of another model or seed than the run; start a new run")
