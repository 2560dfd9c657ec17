"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from .config import Schedule


def learning_rate(step: int, *, steps: int, schedule: Schedule) -> float:
    """The rate for the update of `step` (counted from 0) in a run of `steps`.

    Linear warm-up reaches the peak at step `warmup_steps`; the first update already moves. Then half a cosine down to
    `final_share` of the peak at the last step.
    """
    if step < schedule.warmup_steps:
        return schedule.peak_lr * (step + 1) / (schedule.warmup_steps + 1)
    span = max(1, steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / span)
    share = schedule.final_share + (1 - schedule.final_share) * 0.5 * (1 + math.cos(math.pi * progress))
    return schedule.peak_lr * share
