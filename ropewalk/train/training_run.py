"""A run in training, as the loop and its hooks see it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from ropewalk.base.events import EventLog
from ropewalk.base.progress import Progress
from ropewalk.checkpoint.disk import Disk
from ropewalk.checkpoint.run_state import State
from ropewalk.config.ranks import ranks
from ropewalk.load.batch import Batch
from ropewalk.load.stalls import Stalls
from ropewalk.parallel.compat import deterministic
from ropewalk.parallel.executor import Executor, StepHooks
from ropewalk.parallel.kernels.matmul_tuning import Tuning
from ropewalk.parallel.labels import Part, label
from ropewalk.parallel.mesh import Mesh, join, pick_device

from .active_phase import ActivePhase, Position
from .checkpointer import Checkpointer
from .hooks.anomaly import Anomaly, RollBack
from .hooks.data_stalls import packages_folder
from .hooks.hook import Activity, Hook
from .measure.ceilings import peak_flops
from .mesh_coordinator import MeshCoordinator
from .phase_runner import PhaseRunner
from .requests import Interrupt, RequestExchange, Requests
from .settings import Settings

LABELS: dict[Activity, Part] = {
    "data": "data wait",
    "log": "log",
    "validate": "validate",
    "evaluate": "validate",
    "save": "save",
    "copy": "save",
}
"""What activities are called in a profile and a timeline."""
TUNING = "measuring which kernels are quickest for these shapes, once on GPUs of this kind"


class TrainingRun:
    """One process's view of its run: position, phase, mesh, event log, progress, and requests to the loop."""

    def __init__(self, folder: Path, settings: Settings, progress: Progress, *, disk: Disk | None = None) -> None:
        """Joins the other ranks; opens no phase yet. All ranks must call."""
        self.folder, self.settings, self.progress = folder, settings, progress
        plan = settings.planned.phases[0].plan
        self.place = ranks()
        self.device = pick_device(plan, self.place)
        join(plan, self.place)
        self.mesh = Mesh(plan, self.place.rank)
        self.coordinator = MeshCoordinator(self.mesh.control)
        if settings.train.threads:
            torch.set_num_threads(settings.train.threads)
        self.events = EventLog(folder, rank=self.place.rank)
        self.peak_flops = peak_flops(self.device, plan.precision)
        self.checkpointer = self._make_checkpointer(disk)
        self.step_hooks, self.stalls = self._make_step_hooks(), Stalls()
        self.phases = PhaseRunner(
            settings,
            self.checkpointer,
            device=self.device,
            step_hooks=self.step_hooks,
            stalls=self.stalls,
            mesh=self.mesh,
            packages=packages_folder(folder, settings.load),
        )
        self.hooks: list[Hook] = []
        self.interrupt = Interrupt()
        self.requests = Requests()
        """Of all ranks; the loop acts on them before the next step."""
        self.phase_ended = False
        self.ends_together = False
        """Whether all ranks have come to the end, or to a stop that they agreed on."""
        self.lr = 0.0
        """The learning rate of the last step."""
        self.in_step = False
        """Whether step `step + 1` has begun."""
        self._own, self._sent, self._exchange = Requests(), Requests(), RequestExchange(self.mesh.control)
        self._rollback_reason = "another rank requested a rollback"

    # Where the run is

    @property
    def at(self) -> Position:
        return self.phases.at

    @property
    def step(self) -> int:
        """Complete steps."""
        return self.phases.at.step

    @property
    def phase(self) -> ActivePhase:
        """The phase in training, with its executor and data."""
        assert self.phases.running, "no phase is open"
        return self.phases.running

    @property
    def executor(self) -> Executor:
        return self.phase.executor

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which speaks for all."""
        return self.place.rank == 0

    def is_due(self, every_steps: int) -> bool:
        """Whether something that happens every so many steps (0: never) and at the end of a phase happens now."""
        return self.phase_ended or (every_steps > 0 and self.step % every_steps == 0)

    # What hooks may ask for, on any rank at any moment

    def request_save(self) -> None:
        """Saves a checkpoint after this step."""
        self._own.save = 1

    def request_stop(self) -> None:
        """Ends the run after this step as if it were the last: the state is saved, the next stage follows."""
        self._own.stop = 1

    def request_rollback(self, reason: str) -> None:
        """Returns to the newest checkpoint and repeats the steps, as `[train.guard]` does after an anomaly: when the
        same step is rejected again, its batch is skipped. What is not saved yet is not saved. The step is the one that
        has begun, else the last one."""
        self._own.rollback, self._rollback_reason = max(1, self.step + self.in_step), reason

    @property
    def rollback_requested(self) -> bool:
        """Whether this rank has requested one that the loop has not obeyed yet."""
        return bool(self._own.rollback or self._sent.rollback)

    def exchange_requests(self) -> None:
        """Takes the requests of all ranks. All ranks must call, every step."""
        self._sent, self._own = self._own, Requests()
        self.requests = self._exchange.exchange(dataclasses.replace(self._sent, interrupt=int(self.interrupt.asked)))

    def drop_rollback_requests(self) -> None:
        """A rollback is about to answer all requests for one. All ranks must call."""
        self._own.rollback = self._sent.rollback = 0
        self._exchange.drop_rollback()

    def take_rollback(self, step: int) -> RollBack:
        """The rollback that some rank requested because of `step`."""
        reason, self._rollback_reason = self._rollback_reason, "another rank requested a rollback"
        return RollBack(Anomaly(step, reason, "rollback"))

    def end_phase(self) -> None:
        """The phase ends with this step."""
        self.phase_ended = True

    # What the loop and hooks do with it

    def say(self, message: str) -> None:
        self.progress.say(message)

    def warn(self, message: str) -> None:
        self.events.write("warning", message=message)
        self.say(f"warning: {message}")

    def advance(self, batch: Batch) -> None:
        """One more step is complete."""
        at = self.at
        at.phase_step, at.step = at.phase_step + 1, at.step + 1
        at.tokens += batch.tokens.numel() * self.mesh.data.size
        self.phase_ended, self.in_step = at.phase_step == self.phase.phase.steps, False

    def state(self) -> State:
        """What a checkpoint of this moment holds."""
        return self.phases.state(ended=self.phase_ended)

    def sync(self) -> None:
        """The device completes all steps, and hooks look at them: one of them may have gone wrong."""
        for hook in self.hooks:
            hook.on_sync(self)

    @contextlib.contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """The block is this activity: every hook's context around it, and its name in a profile."""
        with contextlib.ExitStack() as stack:
            if activity in LABELS:
                stack.enter_context(label(LABELS[activity]))
            for hook in self.hooks:
                stack.enter_context(hook.during(self, activity))
            yield

    def same_bits(self) -> contextlib.AbstractContextManager[None]:
        """Deterministic algorithms in the block, if the plan asks for them."""
        plan = self.settings.planned.phases[0].plan
        return deterministic(self.device) if plan.deterministic else contextlib.nullcontext()

    def use(self, hooks: Iterable[Hook]) -> None:
        """Calls these hooks from now on, before any phase is open."""
        self.hooks = list(hooks)
        # An optimizer on the host waits for hooks that look at gradients.
        if any(type(hook).on_gradients is not Hook.on_gradients for hook in self.hooks):
            self.step_hooks.on_gradients.append(self._on_gradients)

    def close(self) -> None:
        """Completes what is being saved, stops the threads and closes the event log."""
        self.checkpointer.close()
        self.phases.close()
        self.events.close()

    def _make_checkpointer(self, disk: Disk | None) -> Checkpointer:
        world = self.mesh.world.size
        checkpointer = Checkpointer(
            self.folder,
            self.settings.checkpoint,
            warn=self.warn,
            ranks=world,
            place=self.place,
            attempt=self.coordinator.broadcast(f"{time.time_ns():x}-{self.place.restart}"),
            coordinator=self.coordinator if world > 1 else None,
            disk=disk,
        )
        checkpointer.observe(self.mesh.traffic, but=self.mesh.control.name)
        return checkpointer

    def _make_step_hooks(self) -> StepHooks:
        return StepHooks(
            before_change=[self.checkpointer.fence],
            before_tuning=[lambda: self.say(TUNING)] if self.leads else [],
            after_tuning=[self._after_tuning],
        )

    def _after_tuning(self, tuning: Tuning) -> None:
        self.events.write("tuned", step=self.step, **dataclasses.asdict(tuning))
        if tuning.left_out and self.leads:
            self.say(tuning.reason())

    def _on_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        for hook in self.hooks:
            hook.on_gradients(self, gradients)
