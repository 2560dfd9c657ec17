"""The learning rate as a function of the step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from .config import MilestoneUnit, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How long a phase is and how fast it reads."""

    steps: int
    tokens: Callable[[int], int] = lambda steps: steps
    """Tokens that so many steps read."""
    tokens_per_epoch: int = 1
    """Training tokens there are; a mixture reads its sources unevenly, an epoch is that many tokens of it."""

    def cycle(self, step: int, schedule: Schedule) -> tuple[int, Extent]:
        """The first step of the cycle that `step` belongs to, and the cycle's own extent."""
        begin, steps = next(cycle for cycle in reversed(schedule.cycles(self.steps)) if cycle[0] <= step)
        before = self.tokens(begin)
        return begin, dataclasses.replace(self, steps=steps, tokens=lambda done: self.tokens(begin + done) - before)

    def read(self, step: int, unit: MilestoneUnit) -> float:
        """What lies behind when `step` steps are done."""
        tokens = self.tokens(step)
        return {"steps": step, "tokens": tokens, "epochs": tokens / self.tokens_per_epoch}[unit]


def learning_rate(step: int, *, extent: Extent, schedule: Schedule) -> float:
    """The rate for the update of `step` (counted from 0).

    Linear warm-up reaches the peak at step `warmup_steps`; the first update already moves. Then the shape decides. Each
    of the schedule's restarts begins anew.
    """
    if schedule.restarts:
        begin, extent = extent.cycle(step, schedule)
        step -= begin
    warmup = schedule.warmup(extent.steps)
    if step < warmup:
        return schedule.peak_lr * (step + 1) / (warmup + 1)
    return schedule.peak_lr * SHAPES[schedule.shape](step, extent, schedule)


def _cosine(step: int, extent: Extent, schedule: Schedule) -> float:
    """Half a cosine down to `final_lr_ratio` at the last step (Loshchilov and Hutter 2017, one cycle)."""
    return _falling(0.5 * (1 + math.cos(math.pi * _progress(step, extent, schedule))), schedule)


def _linear(step: int, extent: Extent, schedule: Schedule) -> float:
    """A line down to `final_lr_ratio` at the last step."""
    return _falling(1 - _progress(step, extent, schedule), schedule)


def _milestones(step: int, extent: Extent, schedule: Schedule) -> float:
    """`factor` once more for each milestone that lies behind."""
    behind = extent.read(step, schedule.milestone_unit)
    return schedule.factor ** sum(milestone <= behind for milestone in schedule.milestones)


def _warmup_stable_decay(step: int, extent: Extent, schedule: Schedule) -> float:
    """The peak, then down to `final_lr_ratio` at the last step within `decay_share` of the run (Hu et al. 2024)."""
    span = schedule.decay_steps(extent.steps)
    progress = max(0.0, (step - (extent.steps - 1 - span)) / span)
    # Hägele et al. 2024 find 1 - sqrt better than the line.
    return _falling(1 - (math.sqrt(progress) if schedule.decay_form == "1-sqrt" else progress), schedule)


def _constant(step: int, extent: Extent, schedule: Schedule) -> float:
    return 1.0


SHAPES: dict[str, Callable[[int, Extent, Schedule], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "step": _milestones,
    "wsd": _warmup_stable_decay,
    "constant": _constant,
    "adaptive": _constant,  # times the share of train/hooks/plateau.py
}
"""The share of the peak after warm-up."""


def _progress(step: int, extent: Extent, schedule: Schedule) -> float:
    """0 at the end of warm-up, 1 at the last step."""
    warmup = schedule.warmup(extent.steps)
    span = max(1, extent.steps - 1 - warmup)
    return min(1.0, (step - warmup) / span)


def _falling(height: float, schedule: Schedule) -> float:
    """`height`, from 1 down to 0, as a share from 1 down to `final_lr_ratio`."""
    return schedule.final_lr_ratio + (1 - schedule.final_lr_ratio) * height
