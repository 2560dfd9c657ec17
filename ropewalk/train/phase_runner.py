"""Tracks the current phase: resume, advance, roll back."""

from __future__ import annotations

import dataclasses
import functools
import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from ropewalk.base.errors import RunConflict
from ropewalk.checkpoint.format import FILE, step_path
from ropewalk.checkpoint.read.load import Fill
from ropewalk.checkpoint.read.model_check import check_weights
from ropewalk.checkpoint.run_state import State
from ropewalk.load.stalls import Stalls
from ropewalk.parallel.comm import Group, alone
from ropewalk.parallel.executor import StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import Choose, Placement, chunk_sizes, whole_placement

from .active_phase import ActivePhase, Position
from .checkpointer import Checkpointer
from .hooks.validation import has_stopped
from .settings import Settings


@dataclass(frozen=True, slots=True)
class _Opened:
    """How to load a checkpoint."""

    wants: Choose | None
    """The shards this rank needs; None: all."""
    fill: Fill | None
    """Consumes the tensors as they are read; None: they stay in memory, to be saved."""


class PhaseRunner:
    """The position of a run and its open phase."""

    def __init__(
        self,
        settings: Settings,
        checkpointer: Checkpointer,
        *,
        device: torch.device,
        step_hooks: StepHooks,
        stalls: Stalls,
        mesh: Mesh | None = None,
        packages: Path | None = None,
    ) -> None:
        self._packages = packages
        self._settings, self._checkpointer, self._device, self._step_hooks = settings, checkpointer, device, step_hooks
        self._stalls, self._mesh = stalls, mesh
        self._world = mesh.world if mesh else alone()
        # Every phase reads the same files: verify once.
        self._verifies = settings.load.verify == "open"
        self.at = Position()
        self.running: ActivePhase | None = None
        """The open phase; None when the last one is over."""

    def restore(self) -> Path | None:
        """Resumes from the newest complete checkpoint and returns its path, or begins the first phase. All ranks must
        call.

        Every rank reads its own shards, one tensor at a time. After the end of a phase it reads the shards of the next
        phase, so the states of two phases are never in memory together.
        """
        with self._checkpointer.search(check=check_weights) as search:
            while head := search.find():
                opened = self._open_for(head)
                if search.load(opened.wants, opened.fill):
                    break
        state = search.state
        if state is None:
            self.at = Position()
            self._open(0).begin(None)
            return None
        if opened.fill is None:
            self._checkpointer.make_durable(state)
            return self.restore()
        self.at = Position(state.phase, state.phase_step, state.step, state.tokens)
        if self._is_inside(state):
            self._checkpointer.make_durable(self.state())
        elif self.running:
            self.at.phase, self.at.phase_step = state.phase + 1, 0
        return self._checkpointer.path(state.step)

    def advance(self) -> None:
        """Starts the next phase from the durable checkpoint of the last one."""
        last = self.at.phase + 1 == len(self._settings.phases)
        self.close()
        if not last:
            self.restore()

    def state(self, *, ended: bool = False) -> State:
        """The state to checkpoint now; `ended` at the end of the phase."""
        assert self.running, "no phase is open"
        return self.running.state(self.at, seed=self._settings.seed, ended=ended)

    @property
    def stable_step(self) -> int | None:
        """The step of the run at which the open phase starts its last decay; None for schedules without one."""
        steps = self._settings.phases[self.at.phase].stable_steps
        return None if steps is None else self.at.step - self.at.phase_step + steps

    def close(self) -> None:
        """Stops the loader and frees the memory of the open phase."""
        if self.running:
            self.running.close()
            self.running = None
            # Model and executor form a reference cycle: without this, their memory stays allocated while the next
            # phase is built.
            gc.collect()

    def _open_for(self, head: State) -> _Opened:
        """Opens the phase that continues from a checkpoint, if any. An end of phase that is not durable is saved
        first, because the next phase reads only some of its tensors."""
        self._check_is_ours(head)
        if self._is_inside(head):
            phase = self._open(head.phase)
            return _Opened(phase.executor.wants(), phase.resume)
        if not self._checkpointer.is_durable(head.step):
            self.close()
            return _Opened(functools.partial(_share, self._world), None)
        if head.phase + 1 < len(self._settings.phases):
            phase = self._open(head.phase + 1)
            return _Opened(phase.wants(head), phase.begin)
        self.close()
        return _Opened(None if self._world.rank == 0 else lambda *_: None, _verify)

    def _open(self, index: int) -> ActivePhase:
        """Builds phase `index`."""
        self.close()
        running = ActivePhase(
            self._settings,
            index,
            device=self._device,
            step_hooks=self._step_hooks,
            verify=self._verifies,
            stalls=self._stalls,
            mesh=self._mesh,
            packages=self._packages,
        )
        # With `on_damage = "skip"`, each phase must find the damage to skip.
        self._verifies = self._verifies and self._settings.load.on_damage == "skip"
        self.running = running
        return running

    def _is_inside(self, state: State) -> bool:
        """Whether the phase of `state` has steps left: not ended, or extended since."""
        if not state.phase_ended:
            return True
        phase, early_stop = self._settings.phases[state.phase], self._settings.train.early_stop
        if state.phase_step >= phase.steps:
            return False
        return not has_stopped(state.validation, early_stop) or state.phase_step in phase.schedule.restarts

    def _check_is_ours(self, head: State) -> None:
        """Raises RunConflict unless the checkpoint has this run's model and seed."""
        if not self._is_ours(head):
            raise RunConflict(
                f"{step_path(Path('checkpoints'), head.step) / FILE}: this checkpoint is of another model or seed than "
                "the run; `ropewalk checkpoint verify` tells whether it is damaged: move it away if so, and the one "
                "before is taken, else start a new run"
            )

    def _is_ours(self, state: State) -> bool:
        settings = self._settings
        if state.phase >= len(settings.phases) or state.seed != settings.seed:
            return False
        model, spec = settings.model(state.phase), state.spec
        if "positions.weight" not in model.shapes():
            # A phase added later may have longer sequences; no parameter depends on that.
            spec = dataclasses.replace(spec, sequence_length=model.sequence_length)
        return spec == model


def _verify(state: State) -> None:
    """Reads every tensor, which verifies its checksum."""
    for tensors in (state.model, state.optimizer):
        for name in tensors:
            tensors[name]


def _share(world: Group, _group: str, _name: str, shape: tuple[int, ...]) -> Placement:
    """An even split along the first dimension, for any tensor."""
    if not shape:
        return whole_placement(shape, first=world.rank == 0)
    return whole_placement(shape).further(0, chunk_sizes(shape[0], world.size), world)
