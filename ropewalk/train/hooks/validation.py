"""Validation during training, learning-rate reduction on plateaus and early stopping. No torch.

Plateau and Stopper are the only state of a run that is not a function of the step; they are checkpointed, so a resumed
run makes the same decisions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ropewalk.base.progress import counted

from ..config import EarlyStop, Schedule
from .hook import Hook

if TYPE_CHECKING:
    from ropewalk.load.batch import Batch

    from ..training_run import TrainingRun


class Validation(Hook):
    """Measures the validation loss every `every_steps` steps (0: never) and at the end of each phase."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps

    def before_forward(self, run: TrainingRun, batch: Batch) -> None:
        if run.at.phase_step in run.phase.phase.schedule.restarts:
            run.phase.begin_cycle()
            run.say(f"step {run.step}: a new cycle of the learning rate begins")

    def end_step(self, run: TrainingRun) -> None:
        if run.is_due(self._every_steps):
            with run.during("validate"):
                self._react(run, self._measure(run))

    def _measure(self, run: TrainingRun) -> float:
        run.sync()
        start, held_out = time.perf_counter(), run.phase.data.held_out
        scores = run.executor.score(held_out).log_probabilities.double().cpu()
        weight = held_out.weight.double()
        loss: float = -(scores * weight).sum().item() / max(1.0, weight.sum().item())
        bits_per_byte = loss / math.log(2) / run.phase.data.bytes_per_token
        seconds, sequences = time.perf_counter() - start, len(held_out.tokens)
        run.events.write(
            "validation", step=run.step, loss=loss, bits_per_byte=bits_per_byte, sequences=sequences, seconds=seconds
        )
        run.say(f"step {run.step}: validation loss {loss:.4f} ({counted(sequences, 'held-out sequence')})")
        # The loader prefetches during the next pause of this length.
        run.phase.expect("evaluation", done=run.at.phase_step, in_steps=self._every_steps, seconds=seconds)
        return loss

    def _react(self, run: TrainingRun, loss: float) -> None:
        phase = run.phase
        for hook in run.hooks:
            hook.on_validation(run, loss)
        if phase.plateau.observe(loss):
            share = phase.plateau.share
            run.say(f"step {run.step}: validation stopped gaining; learning rate now x {share:.3g}")
        if phase.stopper.observe(loss, step=run.step):
            run.checkpointer.save_best(run.phases.state())
        if phase.stopper.stops:
            self._stop_early(run, best_step=phase.stopper.best_step)

    def _stop_early(self, run: TrainingRun, *, best_step: int) -> None:
        """Ends the phase with the weights of its best validation."""
        run.events.write("stopped_early", step=run.step, best_step=best_step)
        run.say(f"step {run.step}: validation stopped gaining; the phase ends as of step {best_step}")
        weights = run.checkpointer.best_weights(best_step, run.executor.wants())
        run.executor.load_state(weights, {})
        weights.check()
        run.end_phase()


class Patience:
    """Counts consecutive validations that did not improve on the best by `min_delta`."""

    def __init__(self, *, min_delta: float) -> None:
        self._min_gain = min_delta
        self._best: float | None = None
        self.waited = 0

    def gains(self, loss: float) -> bool:
        """Records a validation loss; returns whether it improved by `min_delta`."""
        if self._best is None or loss < self._best - self._min_gain:
            self._best, self.waited = loss, 0
            return True
        self.waited += 1
        return False

    def state(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self.waited}

    def load(self, state: dict[str, Any]) -> None:
        self._best, self.waited = state["best"], state["waited"]


class Plateau:
    """The learning-rate factor after the validations so far; always 1 for schedules other than `adaptive`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._patience = Patience(min_delta=schedule.min_delta)
        self.share = 1.0

    def observe(self, loss: float) -> bool:
        """Records a validation loss; returns whether it lowered the factor."""
        schedule = self._schedule
        if schedule.shape != "adaptive" or self._patience.gains(loss):
            return False
        if self._patience.waited < schedule.patience or self.share == schedule.final_lr_ratio:
            return False
        self._patience.waited = 0
        self.share = max(schedule.final_lr_ratio, self.share * schedule.factor)
        return True

    def state(self) -> dict[str, Any]:
        """JSON state to checkpoint; empty for other schedules."""
        return {"share": self.share, **self._patience.state()} if self._schedule.shape == "adaptive" else {}

    def load(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`."""
        if state:
            self.share = state["share"]
            self._patience.load(state)


def has_stopped(validation: Mapping[str, Any], settings: EarlyStop | None) -> bool:
    """Whether the phase of a checkpoint with this validation state has stopped early."""
    early_stop = validation.get("early_stop")
    waited = early_stop.get("waited") if isinstance(early_stop, Mapping) else None
    return settings is not None and isinstance(waited, int) and waited >= settings.patience


class Stopper:
    """Early stopping: whether validations of this phase stopped improving; never without settings."""

    def __init__(self, settings: EarlyStop | None) -> None:
        self._settings = settings
        self._patience = Patience(min_delta=settings.min_delta if settings else 0.0)
        self.best_step = 0
        """Step of the run with the best validation."""

    def observe(self, loss: float, *, step: int) -> bool:
        """Records the validation loss of `step`; returns whether it is the best of the phase, to be saved."""
        if self._settings is None or not self._patience.gains(loss):
            return False
        self.best_step = step
        return True

    @property
    def stops(self) -> bool:
        """Whether to end the phase."""
        return self._settings is not None and self._patience.waited >= self._settings.patience

    def state(self) -> dict[str, Any]:
        """JSON state to checkpoint; empty without settings."""
        return {"best_step": self.best_step, **self._patience.state()} if self._settings else {}

    def load(self, state: dict[str, Any]) -> None:
        """Restores the result of `state`."""
        if state and self._settings:
            self.best_step = state["best_step"]
            self._patience.load(state)
