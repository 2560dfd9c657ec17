"""What follows from validations that no longer gain: a lower rate, or the end of the phase.

The only parts of a run that are not functions of the step; their state is part of the checkpoint, so that a killed run
goes on with the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import EarlyStop, Schedule


class Patience:
    """Counts validations in a row that did not beat the best by `min_delta`."""

    def __init__(self, *, min_delta: float) -> None:
        self._min_gain = min_delta
        self._best: float | None = None
        self.waited = 0

    def gains(self, loss: float) -> bool:
        """Takes a validation loss; whether it is the best by far enough."""
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
    """The share of the rate that is left after the validations so far; always 1 for other schedules than `adaptive`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._patience = Patience(min_delta=schedule.min_delta)
        self.share = 1.0

    def observe(self, loss: float) -> bool:
        """Takes a validation loss; whether it lowered the share."""
        schedule = self._schedule
        if schedule.shape != "adaptive" or self._patience.gains(loss):
            return False
        if self._patience.waited < schedule.patience or self.share == schedule.final_lr_ratio:
            return False
        self._patience.waited = 0
        self.share = max(schedule.final_lr_ratio, self.share * schedule.factor)
        return True

    def state(self) -> dict[str, Any]:
        """What to remember to continue: JSON, empty for other schedules."""
        return {"share": self.share, **self._patience.state()} if self._schedule.shape == "adaptive" else {}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        if state:
            self.share = state["share"]
            self._patience.load(state)


def has_stopped(validation: Mapping[str, Any], settings: EarlyStop | None) -> bool:
    """Whether the phase of a checkpoint that remembers this of its validations has stopped early."""
    early_stop = validation.get("early_stop")
    waited = early_stop.get("waited") if isinstance(early_stop, Mapping) else None
    return settings is not None and isinstance(waited, int) and waited >= settings.patience


class Stopper:
    """Whether validations in this phase have stopped gaining; never without settings."""

    def __init__(self, settings: EarlyStop | None) -> None:
        self._settings = settings
        self._patience = Patience(min_delta=settings.min_delta if settings else 0.0)
        self.best_step = 0
        """Step of the best validation, counted over the run."""

    def observe(self, loss: float, *, step: int) -> bool:
        """Takes the validation loss of `step`; whether it is the best of the phase, to be kept."""
        if self._settings is None or not self._patience.gains(loss):
            return False
        self.best_step = step
        return True

    @property
    def stops(self) -> bool:
        """Whether the phase is to end."""
        return self._settings is not None and self._patience.waited >= self._settings.patience

    def state(self) -> dict[str, Any]:
        """What to remember to continue: JSON, empty without settings."""
        return {"best_step": self.best_step, **self._patience.state()} if self._settings else {}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        if state and self._settings:
            self.best_step = state["best_step"]
            self._patience.load(state)
