"""When a run saves: at intervals, at the end of phases, on request and before it ends; what has become durable."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

import torch

from ropewalk.base.errors import Preempted, StorageError, UserError
from ropewalk.parallel.placement import LocalShard

from ..checkpointer import Checkpointer
from .anomaly import diverged
from .hook import Activity, Hook
from .metrics import all_finite

if TYPE_CHECKING:
    from ropewalk.checkpoint.run_state import State
    from ropewalk.parallel.executor import StepResult

    from ..training_run import TrainingRun


class Checkpointing(Hook):
    """Saves through the run's `Checkpointer`."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def before_phase(self, run: TrainingRun) -> None:
        self._checkpointer.spare(run.phases.stable_step)

    def before_step(self, run: TrainingRun) -> None:
        if run.requests.save and not self._checkpointer.holds(run.step):
            with run.during("save"):
                self._save(run)
        self._checkpointer.step_began()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if run.device.type == "cpu":
            self._checkpointer.steps_settled()
        if not self._checkpointer.prepared:
            self._checkpointer.prepare(run.phases.state())

    def end_step(self, run: TrainingRun) -> None:
        due = self._checkpointer.interval.due(run.step) or run.at.phase_step == run.phase.phase.stable_steps
        if due or run.phase_ended:
            with run.during("save"):
                self._save(run)
        elif self._checkpointer.copy_due(run.step):
            with run.during("copy"):
                self._checkpointer.copy(self._sound_state(run))
        self._report(run)

    def on_sync(self, run: TrainingRun) -> None:
        self._checkpointer.steps_settled()

    def during(self, run: TrainingRun, activity: Activity) -> contextlib.AbstractContextManager[None]:
        return self._checkpointer.traffic() if activity == "data" else contextlib.nullcontext()

    def on_interrupt(self, run: TrainingRun) -> None:
        """Saves the last step; Preempted when a scheduler asked."""
        if not run.coordinator.agree(run.interrupt.preempted_at is None):
            self._make_room(run, run.interrupt.preempted_at or time.monotonic())
        self._checkpointer.settle()
        self._save_last(run, "interrupted")
        self._checkpointer.interval.stop()

    def before_end(self, run: TrainingRun) -> None:
        if run.phases.running:
            with run.during("save"):
                self._save_last(run, "stopped by a hook", until_durable=True)
        self._checkpointer.end()
        self._report(run)

    def _save(self, run: TrainingRun, *, until_durable: bool = False) -> None:
        start = time.perf_counter()
        state = self._sound_state(run)
        self._checkpointer.save(state, spent_s=time.perf_counter() - start)
        for hook in run.hooks:
            hook.on_save(run, state)
        if run.phase_ended or until_durable:
            # The next phase may take the memory, and the end of a run is not announced before it is durable.
            self._checkpointer.settle()
            self._report(run)
            while not self._checkpointer.holds(state.step):
                # Each failure counts; the last one allowed raises.
                self._checkpointer.save(state)
                self._checkpointer.settle()
                self._report(run)

    def _sound_state(self, run: TrainingRun) -> State:
        """The state of this step, unless something went wrong with it."""
        run.sync()
        state = run.state()
        # Saved, broken weights would push the last good ones out of retention.
        finite = all_finite(_local(tensor) for tensor in state.model.values())
        if not run.coordinator.agree(finite and not run.rollback_requested):
            if run.coordinator.agree(finite):
                raise run.take_rollback(state.step)
            raise UserError(diverged("the weights are no longer finite", state.step))
        return state

    def _report(self, run: TrainingRun) -> None:
        """Reports which checkpoints have become durable, and how often they will be made."""
        for saved in self._checkpointer.finished():
            if saved.error:
                run.events.write("save_failed", step=saved.step, error=str(saved.error))
                continue
            if run.phases.running:
                in_steps = self._checkpointer.interval.until_due(run.step)
                seconds = saved.copy_s + saved.persist_s
                run.phase.expect("checkpoint", done=run.at.phase_step, in_steps=in_steps, seconds=seconds)
            if not run.leads:
                continue  # rank 0 alone knows when it is whole
            run.events.write(
                "saved",
                step=saved.step,
                path=str(saved.path),
                seconds=saved.blocked_s,
                copy_s=saved.copy_s,
                persist_s=saved.persist_s,
                tasks_s=saved.tasks_s,
                bytes=saved.bytes,
            )
            for hook in run.hooks:
                hook.after_save(run, saved)
        for copied in self._checkpointer.copied():
            run.events.write("copied", **dataclasses.asdict(copied))
        decision = self._checkpointer.decide()
        if decision:
            run.events.write("save_interval", step=run.step, **dataclasses.asdict(decision))
            run.say(f"checkpoints: {decision}")

    def _make_room(self, run: TrainingRun, asked: float) -> None:
        """Ends within the grace time, with the last step saved when that can be done by then."""
        checkpointer = self._checkpointer
        fits = checkpointer.hurry(asked + run.settings.train.faults.grace_s - time.monotonic())
        try:
            if fits:
                checkpointer.settle()
                self._save_last(run, "interrupted")
        except StorageError as error:
            run.warn(str(error))
        saved = checkpointer.holds(run.step)
        if saved:
            checkpointer.interval.stop()
        run.events.write("preempted", step=run.step, saved=saved, seconds=time.monotonic() - asked)
        state = (
            f"step {run.step} is saved" if saved else f"no time to save step {run.step}, older checkpoints are intact"
        )
        run.ends_together = True
        raise Preempted(f"preempted: {state}; the same command continues")

    def _save_last(self, run: TrainingRun, why: str, *, until_durable: bool = False) -> None:
        """Makes a checkpoint of the last step, unless there is one."""
        if run.step and not self._checkpointer.holds(run.step):
            self._save(run, until_durable=until_durable)
            self._checkpointer.settle()
            run.say(f"{why}: saved step {run.step}")
        self._report(run)


def _local(tensor: torch.Tensor | LocalShard) -> torch.Tensor:
    return tensor.local if isinstance(tensor, LocalShard) else tensor
