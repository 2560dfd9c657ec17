"""The learning rate as a function of the step, and every shape of it by its name in a recipe.

A shape is a frozen dataclass of settings with `share`: the share of the peak after warm-up. A user's own,
`train.schedule.shape = "mine:Sawtooth"`, is one too, with its settings in `[train.schedule.settings]`; or a function
with the arguments of `share`, without settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ropewalk.config.registry import Kind, Registry

if TYPE_CHECKING:
    from .config import Schedule

MilestoneUnit = Literal["steps", "tokens", "epochs"]


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


class ScheduleShape(Protocol):
    """The learning rate after warm-up, as a share of the peak: a pure function of the step."""

    def share(self, step: int, *, warmup: int, extent: Extent) -> float:
        """The share at `step` of a cycle, counted from 0 with its `warmup` steps."""


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
    own: ScheduleShape | None = schedule.own_settings()
    share = SCHEDULES[schedule.shape].load() if own is None else own.share
    return schedule.peak_lr * float(share(step, warmup=warmup, extent=extent))


def steady_steps(schedule: Schedule, steps: int, warmup: int) -> int:
    """Steps from the beginning of a cycle of `steps` that are the same in a longer one: warm-up, and after it as many
    as the shape's `steady` says; a user's shape without it may change at once."""
    steady = getattr(schedule.own_settings(), "steady", None)
    return min(steps, warmup) if steady is None else steady(steps, warmup=warmup)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cosine:
    """Half a cosine down to `final_lr_ratio` at the last step (Loshchilov and Hutter 2017, one cycle)."""

    final_lr_ratio: float

    def share(self, step: int, *, warmup: int, extent: Extent) -> float:
        return _falling(0.5 * (1 + math.cos(math.pi * _progress(step, warmup, extent))), self.final_lr_ratio)

    def steady(self, steps: int, *, warmup: int) -> int:
        return min(steps, warmup + 1)  # the first step after warm-up is at the peak


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearDecay:
    """A line down to `final_lr_ratio` at the last step."""

    final_lr_ratio: float

    def share(self, step: int, *, warmup: int, extent: Extent) -> float:
        return _falling(1 - _progress(step, warmup, extent), self.final_lr_ratio)

    def steady(self, steps: int, *, warmup: int) -> int:
        return min(steps, warmup + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Milestones:
    """Times `factor` at each of `milestones`."""

    factor: float
    milestones: tuple[float, ...]
    milestone_unit: MilestoneUnit

    def share(self, step: int, *, warmup: int, extent: Extent) -> float:
        behind = extent.read(step, self.milestone_unit)
        return self.factor ** sum(milestone <= behind for milestone in self.milestones)

    def steady(self, steps: int, *, warmup: int) -> int:
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupStableDecay:
    """The peak, then down to `final_lr_ratio` in the last `decay_share` of the run (Hu et al. 2024)."""

    final_lr_ratio: float
    decay_share: float
    decay_form: Literal["1-sqrt", "linear"]

    def share(self, step: int, *, warmup: int, extent: Extent) -> float:
        span = self.decay_steps(extent.steps)
        progress = max(0.0, (step - (extent.steps - 1 - span)) / span)
        # Hägele et al. 2024 find 1 - sqrt better than the line.
        return _falling(1 - (math.sqrt(progress) if self.decay_form == "1-sqrt" else progress), self.final_lr_ratio)

    def steady(self, steps: int, *, warmup: int) -> int:
        return steps - self.decay_steps(steps)

    def decay_steps(self, steps: int) -> int:
        """Steps of a cycle of `steps` in which the rate decays, at least one."""
        return max(1, round(self.decay_share * steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """The peak."""

    def share(self, step: int, *, warmup: int, extent: Extent) -> float:
        return 1.0

    def steady(self, steps: int, *, warmup: int) -> int:
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive(Constant):
    """Times `factor` whenever the validation loss stops improving."""

    # The peak, times the share of train/hooks/validation.py.
    factor: float
    final_lr_ratio: float
    patience: int
    min_delta: float


_SHAPES = {
    "cosine": Cosine,
    "linear": LinearDecay,
    "step": Milestones,
    "wsd": WarmupStableDecay,
    "constant": Constant,
    "adaptive": Adaptive,
}
SCHEDULES = Registry(
    "LR schedule",
    {name: Kind(target=shape, settings=shape, doc=str(shape.__doc__)) for name, shape in _SHAPES.items()},
    methods=("share",),
)


def _progress(step: int, warmup: int, extent: Extent) -> float:
    """0 at the end of warm-up, 1 at the last step."""
    span = max(1, extent.steps - 1 - warmup)
    return min(1.0, (step - warmup) / span)


def _falling(height: float, final: float) -> float:
    """`height`, from 1 down to 0, as a share from 1 down to `final`."""
    return final + (1 - final) * height
