"""Moments of a training run at which something may be added without touching the loop."""

from __future__ import annotations

from typing import Any


class Hook:
    """Does nothing; override the moments you need. Called on every rank."""

    def before_training(self, step: int) -> None:
        """State is restored; `step` is the first to run."""

    def after_step(self, step: int) -> None:
        """`step` steps are complete. Called every step: must not wait for the device."""

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Metrics of an interval were read from the device."""

    def on_validation(self, step: int, loss: float) -> None:
        """The validation loss, nats a token, was measured."""

    def after_save(self, step: int, path: str) -> None:
        """A checkpoint is durable."""

    def after_training(self, step: int) -> None:
        """The last step is complete and saved."""
