"""A user's LR schedule: `train.schedule.shape = "sawtooth:Sawtooth"` in a recipe beside this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ropewalk.config.schema import Range
from ropewalk.train.lr_schedule import Extent


@dataclass(frozen=True, kw_only=True)
class Sawtooth:
    """Falls from the peak to a share of it, over and over."""

    period: Annotated[int, Range(least=1)] = 100
    """Steps of one fall."""
    lowest: Annotated[float, Range(least=0, most=1)] = 0.1
    """Share of the peak at the end of a fall."""

    def share(self, step: int, *, warmup: int, extent: Extent) -> float:
        fallen = (step - warmup) % self.period / self.period
        return 1 - (1 - self.lowest) * fallen

    def steady(self, steps: int, *, warmup: int) -> int:
        return steps  # whatever the length of the run


def halves(step: int, *, warmup: int, extent: Extent) -> float:
    """The peak, then half of it; without settings."""
    return 1.0 if step < extent.steps // 2 else 0.5
