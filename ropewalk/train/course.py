"""The way of a run through its phases: where it stands, what comes next, where it goes back to."""

from __future__ import annotations

from pathlib import Path

import torch

from ropewalk.base.errors import RunConflict
from ropewalk.checkpoint.tensors import State
from ropewalk.load.stalls import Stalls
from ropewalk.parallel.cut import Choose
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
        path, state = self._keeper.newest(wants=self._wants)
        if state is None:
            self.at = Position()
            self._begin(0)
            return None
        if not self._is_ours(state):
            raise RunConflict(f"{path}: this checkpoint is of another model or seed than the run; start a new run")
        self.at = Position(state.phase, state.phase_step, state.step, state.tokens)
        if state.phase_ended:
            self._begin(state.phase + 1, before=state)
        else:
            assert self.running, "opened to say what it wants"
            self.running.resume(state)
        return path

    def advance(self) -> None:
        """Goes on to the phase after the one that is over, whose checkpoint is durable."""
        if self._mesh and self._mesh.world.size > 1:
            # No rank has the whole state but on the disk.
            _, before = self._keeper.newest()
        else:
            before = self.state(ended=True)
        self._begin(self.at.phase + 1, before=before)

    def state(self, *, ended: bool = False) -> State:
        """All that the run needs to go on from here; `ended` when its phase is over."""
        assert self.running, "no phase is at work"
        return self.running.state(self.at, seed=self._settings.seed, ended=ended)

    def close(self) -> None:
        """Stops the reading thread."""
        if self.running:
            self.running.close()
            self.running = None

    def _wants(self, head: State) -> Choose | None:
        """What this rank reads of a checkpoint: in the middle of a phase, which it opens, the parts that it holds. What
        comes next may look at whole tensors."""
        if head.phase_ended or not self._is_ours(head):
            return None
        return self._open(head.phase).executor.wants()

    def _begin(self, index: int, *, before: State | None = None) -> None:
        """Goes to the beginning of phase `index`, after the one `before`; past the last one nothing is at work."""
        self.close()
        if index == len(self._settings.phases):
            return
        running = self._open(index)
        self.at.phase, self.at.phase_step = index, 0
        running.begin(before)

    def _open(self, index: int) -> Running:
        """Makes phase `index` ready."""
        self.close()
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
        return running

    def _is_ours(self, state: State) -> bool:
        """Whether a state is of this run's model and seed."""
        settings = self._settings
        known = state.phase < len(settings.phases) and state.spec == settings.model(state.phase)
        return known and state.seed == settings.seed
