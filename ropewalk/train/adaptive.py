"""A learning rate that falls when validation no longer gains: the only schedule that is not a function of the step."""

from __future__ import annotations

from typing import Any

from .config import Schedule


class Plateau:
    """The share of the rate that is left after the validations so far; always 1 for other schedules.

    Its state is part of the checkpoint: a killed run goes on with the same rates.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.share = 1.0
        self._best: float | None = None
        self._waited = 0

    def observe(self, loss: float) -> bool:
        """Takes a validation loss; whether it lowered the share."""
        if self._schedule.shape != "adaptive":
            return False
        if self._best is None or loss < self._best - self._schedule.min_gain:
            self._best, self._waited = loss, 0
            return False
        self._waited += 1
        if self._waited < self._schedule.patience or self.share == self._schedule.final_share:
            return False
        self._waited = 0
        self.share = max(self._schedule.final_share, self.share * self._schedule.factor)
        return True

    def state(self) -> dict[str, Any]:
        """What to remember to continue: JSON, empty for other schedules."""
        if self._schedule.shape != "adaptive":
            return {}
        return {"share": self.share, "best": self._best, "waited": self._waited}

    def load(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        if state:
            self.share, self._best, self._waited = state["share"], state["best"], state["waited"]
