"""The way of a run through its phases: where it stands, what comes next, where it goes back to."""

from __future__ import annotations

import dataclasses
import functools
import gc
from pathlib import Path

import torch

from ropewalk.base.errors import RunConflict
from ropewalk.checkpoint.format import FILE, step_path
from ropewalk.checkpoint.read.model_check import check_weights
from ropewalk.checkpoint.tensors import State
from ropewalk.load.stalls import Stalls
from ropewalk.parallel.comm import Group, alone
from ropewalk.parallel.executor import Points
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import Choose, Placement, chunk_sizes, whole_placement

from .active_phase import ActivePhase, Position
from .checkpointer import Checkpointer
from .hooks.plateau import has_stopped
from .settings import Settings


class PhaseRunner:
    """How far a run has come, and the phase that is at work."""

    def __init__(
        self,
        settings: Settings,
        checkpointer: Checkpointer,
        *,
        device: torch.device,
        points: Points,
        stalls: Stalls,
        mesh: Mesh | None = None,
        packages: Path | None = None,
    ) -> None:
        self._packages = packages
        self._settings, self._checkpointer, self._device, self._points = settings, checkpointer, device, points
        self._stalls, self._mesh = stalls, mesh
        self._world = mesh.world if mesh else alone()
        # Every phase reads the same files: once is enough.
        self._verifies = settings.load.verify == "open"
        self.at = Position()
        self.running: ActivePhase | None = None
        """None when the last phase is over."""
        self._rescued: State | None = None
        """The end of a phase that was found elsewhere than on the disk: this rank's share of it."""

    def restore(self) -> Path | None:
        """Takes over the newest whole checkpoint and returns its path, or begins the first phase. All ranks must call.

        Every rank reads its own parts of the tensors, one after the other into the place where it is needed. After the
        end of a phase these are the parts that the next one takes over: so a phase that ends needs no memory beside the
        one that begins.
        """
        path, state = self._checkpointer.newest(wants=self._wants, fill=self._fill, check=check_weights)
        if state is None:
            self.at = Position()
            self._begin(0)
            return None
        if self._rescued:
            rescued, self._rescued = self._rescued, None
            self._checkpointer.make_durable(rescued)
            return self.restore()
        if self._is_inside(state):
            self._checkpointer.make_durable(self.state())
        return path

    def advance(self) -> None:
        """Goes on to the phase after the one that is over, whose checkpoint is durable."""
        last = self.at.phase + 1 == len(self._settings.phases)
        self.close()
        if not last:
            self.restore()

    def state(self, *, ended: bool = False) -> State:
        """All that the run needs to go on from here; `ended` when its phase is over."""
        assert self.running, "no phase is at work"
        return self.running.state(self.at, seed=self._settings.seed, ended=ended)

    @property
    def stable_step(self) -> int | None:
        """The step, counted over the run, at which the phase at hand leaves the stable part of its schedule."""
        steps = self._settings.phases[self.at.phase].stable_steps
        return None if steps is None else self.at.step - self.at.phase_step + steps

    def close(self) -> None:
        """Stops the reading thread and frees what the phase at work holds."""
        if self.running:
            self.running.close()
            self.running = None
            # Model and executor know each other by hooks: without this their memory is taken until some later
            # collection, while the next phase fills its own.
            gc.collect()

    def _wants(self, head: State) -> Choose | None:
        """What this rank reads of a checkpoint: the parts that it holds in the phase at work, which it opens; at the
        very end the first rank looks at all of it, whether it is whole."""
        if not self._is_ours(head):
            raise RunConflict(
                f"{step_path(Path('checkpoints'), head.step) / FILE}: this checkpoint is of another model or seed than "
                "the run; `ropewalk checkpoint verify` tells whether it is damaged: move it away if so, and the one "
                "before is taken, else start a new run"
            )
        if self._is_inside(head):
            return self._open(head.phase).executor.wants()
        if not self._checkpointer.is_durable(head.step):
            self.close()
            return functools.partial(_share, self._world)
        if head.phase + 1 < len(self._settings.phases):
            return self._open(head.phase + 1).wants(head)
        self.close()
        return None if self._world.rank == 0 else lambda *_: None

    def _fill(self, state: State) -> None:
        """Takes over a state of which this rank gets what it wants."""
        self.at, self._rescued = Position(state.phase, state.phase_step, state.step, state.tokens), None
        if self.running and self._is_inside(state):
            self.running.resume(state)
        elif self.running:
            self.at.phase, self.at.phase_step = state.phase + 1, 0
            self.running.begin(state)
        elif not self._checkpointer.is_durable(state.step):
            # The phase is over: nobody at work has its tensors any more, and they are to be saved.
            self._rescued = dataclasses.replace(state, model=dict(state.model), optimizer=dict(state.optimizer))
        else:
            for tensors in (state.model, state.optimizer):
                for name in tensors:
                    tensors[name]  # reading checks

    def _begin(self, index: int) -> None:
        """Goes to the beginning of phase `index`, with nothing from before."""
        running = self._open(index)
        self.at.phase, self.at.phase_step = index, 0
        running.begin(None)

    def _open(self, index: int) -> ActivePhase:
        """Makes phase `index` ready."""
        self.close()
        running = ActivePhase(
            self._settings,
            index,
            device=self._device,
            points=self._points,
            verify=self._verifies,
            stalls=self._stalls,
            mesh=self._mesh,
            packages=self._packages,
        )
        # What is to be skipped has to be known by every phase.
        self._verifies = self._verifies and self._settings.load.on_damage == "skip"
        self.running = running
        return running

    def _is_inside(self, state: State) -> bool:
        """Whether steps of the phase of a state are left: it has not ended, or has been given more since."""
        if not state.phase_ended:
            return True
        phase, early_stop = self._settings.phases[state.phase], self._settings.train.early_stop
        if state.phase_step >= phase.steps:
            return False
        return not has_stopped(state.validation, early_stop) or state.phase_step in phase.schedule.restarts

    def _is_ours(self, state: State) -> bool:
        """Whether a state is of this run's model and seed."""
        settings = self._settings
        if state.phase >= len(settings.phases) or state.seed != settings.seed:
            return False
        model, spec = settings.model(state.phase), state.spec
        if "positions.weight" not in model.shapes():
            # A longer row may have come with a phase that was added; nothing of the model depends on it.
            spec = dataclasses.replace(spec, sequence_length=model.sequence_length)
        return spec == model


def _share(world: Group, _group: str, _name: str, shape: tuple[int, ...]) -> Placement:
    """An even share of the rows of any tensor, whatever model it is of."""
    if not shape:
        return whole_placement(shape, first=world.rank == 0)
    return whole_placement(shape).further(0, chunk_sizes(shape[0], world.size), world)
