"""Settings of training: steps, optimizer, schedule, precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ropewalk.config.schema import CONTINUES, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019); matrices decay, norms, biases and positions do not."""

    beta1: Annotated[float, Range(least=0, below=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Range(least=0, below=1)] = 0.95
    """Decay of the mean of squared gradients."""
    epsilon: Annotated[float, Range(above=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Range(least=0)] = 0.1
    """Decoupled decay, multiplied by the learning rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Linear warm-up, then cosine decay to a share of the peak."""

    peak_lr: Annotated[float, Range(above=0)] = 3e-3
    """Learning rate after warm-up."""
    warmup_steps: Annotated[int, Range(least=0)] = 50
    """Steps of linear warm-up."""
    final_share: Annotated[float, Range(least=0, most=1)] = 0.1
    """Learning rate at the last step, as a share of the peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Train:
    """Batches -> weights."""

    steps: Annotated[int, Range(least=1)] = 400
    """Optimizer steps."""
    batch_rows: Annotated[int, Range(least=1)] = 16
    """Rows of `load.sequence_length` tokens in one optimizer step, over all devices."""
    optimizer: AdamW = field(default_factory=AdamW)
    """The optimizer."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate by step."""
    clip_norm: Annotated[float, Range(least=0)] = 1.0
    """Largest gradient norm; longer gradients are scaled down to it. 0 switches clipping off."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`bf16`: matrix products in bfloat16, weights, sums and optimizer in float32. `fp32`: everything in float32.
    `auto`: bf16 where the device has it in hardware."""
    log_every_steps: Annotated[int, Range(least=1), CONTINUES] = 10
    """Steps between metric lines."""
    validate_every_steps: Annotated[int, Range(least=0), CONTINUES] = 100
    """Steps between measurements of the validation loss; 0 measures at the end only."""
    validate_rows: Annotated[int, Range(least=1), CONTINUES] = 64
    """Rows of held-out tokens in each of these measurements."""
    threads: Annotated[int, Range(least=0)] = 0
    """CPU threads of the training process; 0 takes one a core. The same number gives the same bits."""

    def check(self) -> Iterator[tuple[str, str]]:
        if self.schedule.warmup_steps > self.steps:
            yield (
                "schedule.warmup_steps",
                f"{self.schedule.warmup_steps} steps of warm-up are more than the {self.steps} steps of the run; "
                "lower it or raise `train.steps`",
            )
