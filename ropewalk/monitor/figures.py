"""What is measured along a run, by the names that trackers give it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A field of the events of one kind (docs/formats.md)."""

    kind: str
    field: str
    name: str
    """In folders, as TensorBoard groups its charts."""
    column: str
    """Of a table."""


FIGURES = (
    Figure("step", "loss", "train/loss", "loss"),
    Figure("step", "lr", "train/learning_rate", "lr"),
    Figure("step", "grad_norm", "train/grad_norm", "grad_norm"),
    Figure("step", "tokens", "train/tokens", "tokens"),
    Figure("step", "skipped", "train/skipped_updates", "skipped"),
    Figure("step", "loss_scale", "train/loss_scale", "loss_scale"),
    Figure("step", "tokens_per_s", "speed/tokens_per_s", "tokens_per_s"),
    Figure("step", "flops_per_s", "speed/flops_per_s", "flops_per_s"),
    Figure("step", "mfu", "speed/mfu", "mfu"),
    Figure("step", "step_s", "speed/step_s", "step_s"),
    Figure("step", "data_wait_s", "speed/data_wait_s", "data_wait_s"),
    Figure("step", "importance_hit_rate", "speed/importance_hit_rate", "importance_hit_rate"),
    Figure("step", "memory_bytes", "speed/memory_bytes", "memory_bytes"),
    Figure("validation", "loss", "validation/loss", "validation_loss"),
    Figure("validation", "bits_per_byte", "validation/bits_per_byte", "validation_bits_per_byte"),
)
