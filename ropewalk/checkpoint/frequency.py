"""How often to save, from what saving was measured to cost. No torch.

Three bounds, of which the longest holds:

- persisting: a new snapshot before the last one is durable would have to wait for it;
- the budget: training may lose at most a share `overhead` of its time to saving (CheckFreq, Mohan et al. 2021);
- failures: with a cost C a save and a mean time M between failures, saving oftener than every sqrt(2 C M) loses more
  than the work it saves (Young 1974, Daly 2006; good to 1 % while C is far below M).

M is learned as the run goes on. Before the first failure it is what is known of clusters: a failure in about 50,000
hours of one GPU (Llama 3: 419 in 54 days on 16,384, which is 50,700), weighed as one failure that was seen.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal

GPU_HOURS_A_FAILURE = 50_000.0
MEMORY = 16
"""Saves and steps that medians look back on."""

Bound = Literal["persist", "overhead", "failures", "first"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An interval with the numbers that gave it."""

    interval_s: float
    steps: int
    bound: Bound
    """Which of the bounds it is; `first` when nothing was measured yet."""
    blocked_s: float
    persist_s: float
    step_s: float
    mtbf_s: float

    def __str__(self) -> str:
        if self.bound == "first":
            return f"saving after {self.steps} steps to measure what it costs"
        reason = {
            "persist": f"the last one takes {self.persist_s:.2f} s to become durable",
            "overhead": f"a save blocks for {self.blocked_s:.3f} s, and the budget allows no more",
            "failures": (
                f"a save blocks for {self.blocked_s:.3f} s and a failure is due every {self.mtbf_s / 3600:.1f} h"
            ),
        }[self.bound]
        return f"saving every {self.steps} steps ({self.interval_s:.1f} s): {reason}"


class Frequency:
    """Decides when the next save is due, from its own measurements; the first save comes early, to measure."""

    def __init__(self, *, overhead: float = 0.02, mtbf_hours: float | None = None, ranks: int = 1) -> None:
        """`mtbf_hours`: of the whole run, if known; else by the number of `ranks`."""
        self._overhead = overhead
        self._prior_s = 3600 * (mtbf_hours or GPU_HOURS_A_FAILURE / ranks)
        self._seconds, self._failures = 0.0, 0
        self._steps: deque[float] = deque(maxlen=MEMORY)
        self._blocked: deque[float] = deque(maxlen=MEMORY)
        self._persist: deque[float] = deque(maxlen=MEMORY)

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures: what was known before counts as one failure."""
        return (self._prior_s + self._seconds) / (1 + self._failures)

    def saw_step(self, seconds: float) -> None:
        """A step took so long, waiting for saves not counted."""
        self._steps.append(seconds)
        self._seconds += seconds

    def saw_save(self, *, blocked_s: float, persist_s: float) -> None:
        """A save blocked training and became durable so much later."""
        self._blocked.append(blocked_s)
        self._persist.append(persist_s)

    def saw_failure(self) -> None:
        """The run had to start again."""
        self._failures += 1

    def decide(self) -> Decision:
        """The interval now."""
        step = median(self._steps) if self._steps else 0.0
        if not self._blocked or not step:
            return Decision(
                interval_s=0.0, steps=10, bound="first", blocked_s=0.0, persist_s=0.0, step_s=step, mtbf_s=self.mtbf_s
            )
        blocked, persist = median(self._blocked), median(self._persist)
        bounds: dict[Bound, float] = {
            "persist": persist,
            "overhead": blocked / self._overhead,
            "failures": math.sqrt(2 * blocked * self.mtbf_s),
        }
        bound = max(bounds, key=lambda name: bounds[name])
        return Decision(
            interval_s=bounds[bound],
            steps=max(1, math.ceil(bounds[bound] / step)),
            bound=bound,
            blocked_s=blocked,
            persist_s=persist,
            step_s=step,
            mtbf_s=self.mtbf_s,
        )
