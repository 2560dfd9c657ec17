"""Moments of a training run at which something may be added without touching the loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ropewalk.load.batch import Batch


class Hook:
    """Does nothing; override the moments you need. Called on every rank."""

    def before_training(self, step: int) -> None:
        """State is restored; `step` is the first to run."""

    def before_phase(self, phase: int, name: str) -> None:
        """A phase begins or goes on; its model and data are ready."""

    def on_batch(self, step: int, batch: Batch) -> Batch:
        """The batch that brings the run to `step` steps is read; trains on what is returned."""
        return batch

    def on_gradients(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """All gradients of the step are there, not yet clipped; they may be changed in place. Must not wait for the
        device. Where the optimizer is on the host, its work begins after this rather than during the backward pass."""

    def after_step(self, step: int) -> None:
        """`step` steps are complete. Called every step: must not wait for the device."""

    def on_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Metrics of an interval were read from the device."""

    def on_validation(self, step: int, loss: float) -> None:
        """The validation loss, nats a token, was measured."""

    def on_anomaly(self, step: int, what: str, action: str) -> None:
        """A step went wrong and the guard did something about it."""

    def after_save(self, step: int, path: str) -> None:
        """A checkpoint is durable."""

    def after_training(self, step: int) -> None:
        """The last step is complete and saved."""
