"""How often to save, from what saving was measured to cost. No torch.

- The budget: saves may take at most a share `overhead` of the training time (CheckFreq, Mohan et al. 2021), and `auto`
  saves as often as that allows: what a failure loses is then as little as the budget can buy.
- Failures: with a cost C per save and a mean time M between failures, the least time is lost with an interval of
  sqrt(2 C M) (Young 1974, Daly 2006). Where that is shorter than the budget allows, it holds: a run that fails so
  often loses more by a longer one.
- Persisting: a new snapshot before the last one is durable would have to wait for it, so no interval is shorter.

C is what training loses: the time for which a save blocks it, and the time by which steps are slower while the
checkpoint is written in the background.

M is learned from the run's own failures. Before the first it is what is known of clusters: a failure in about 50,000
hours of one GPU (Llama 3: 419 in 54 days on 16,384, which is 50,700), weighed as one failure that was seen. From the
first on, a run that fails more often than that is believed: M is then the time it ran, divided by its failures.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from ropewalk.base.errors import DataError
from ropewalk.base.seal import read_sealed, write_sealed

LEARNED = "frequency.json"


FORMAT = 1


GPU_HOURS_A_FAILURE = 50_000.0


MEMORY = 16
"""Saves that medians look back on."""


STEPS = 64
"""Steps without background writing that the mean looks back on."""


FIRST_STEPS = 10
"""Before the first save, which measures what saving costs."""


LEAST_MTBF_S = 1.0


Bound = Literal["persist", "overhead", "failures", "first"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An interval with the numbers that gave it."""

    interval_s: float
    steps: int
    bound: Bound
    """Which of the bounds it is; `first` when nothing was measured yet."""
    blocked_s: float
    """For which one save blocks training."""
    slowed_s: float
    """By which the steps beside one save are slower."""
    persist_s: float
    step_s: float
    mtbf_s: float
    failures: int
    """Seen in this run so far."""

    @property
    def cost_s(self) -> float:
        """What training loses by one save."""
        return self.blocked_s + self.slowed_s

    def __str__(self) -> str:
        if self.bound == "first":
            return f"saving after {self.steps} steps to measure what it costs"
        cost = (
            f"a save costs {self.cost_s:.3f} s ({self.blocked_s:.3f} s blocked, {self.slowed_s:.3f} s of slower steps)"
        )
        seen = f", {self.failures} failure{'s' * (self.failures != 1)} so far" if self.failures else ""
        reason = {
            "persist": f"the last one takes {self.persist_s:.2f} s to become durable",
            "overhead": f"{cost}, and the budget allows no more",
            "failures": f"{cost} and a failure is due every {_hours(self.mtbf_s)}",
        }[self.bound]
        return f"saving every {self.steps} steps ({self.interval_s:.1f} s): {reason}{seen}"


class Frequency:
    """Decides when the next save is due, from its own measurements; the first save comes early, to measure."""

    def __init__(
        self,
        *,
        overhead: float = 0.02,
        mtbf_hours: float | None = None,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mtbf_hours`: of the whole run, if known; else by the number of `ranks`. Time counts from here on."""
        self._overhead, self._clock = overhead, clock
        self._prior_s = 3600 * (mtbf_hours or GPU_HOURS_A_FAILURE / ranks)
        self._earlier_s, self._began, self.failures = 0.0, clock(), 0
        self._steps: deque[float] = deque(maxlen=MEMORY)
        self._quiet: deque[float] = deque(maxlen=STEPS)
        self._blocked: deque[float] = deque(maxlen=MEMORY)
        self._slowed: deque[float] = deque(maxlen=MEMORY)
        self._persist: deque[float] = deque(maxlen=MEMORY)
        self._writing_s, self._writing_steps = 0.0, 0

    @property
    def seconds(self) -> float:
        """For which the run has lived, earlier launches included."""
        return self._earlier_s + self._clock() - self._began

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures."""
        seconds = self.seconds
        believed = (self._prior_s + seconds) / (1 + self.failures)
        return max(LEAST_MTBF_S, min(believed, seconds / self.failures)) if self.failures else believed

    def saw_steps(self, seconds: float, *, steps: int = 1, writing: bool = False) -> None:
        """Some steps took so long, of which the device had done all by the end. `writing`: while a checkpoint was
        being written."""
        self._steps.append(seconds / steps)
        if writing:
            self._writing_s, self._writing_steps = self._writing_s + seconds, self._writing_steps + steps
        else:
            self._quiet.append(seconds / steps)

    def saw_save(self, *, blocked_s: float, persist_s: float, inside_s: float = 0.0) -> None:
        """A save blocked training, of which for `inside_s` within steps, and became durable so much later."""
        self._blocked.append(blocked_s)
        self._persist.append(persist_s)
        if self._quiet:
            # Noise of either sign stays in, or the median of many would be too high.
            self._slowed.append(self._writing_s - self._writing_steps * _mean(self._quiet) - inside_s)
        self._writing_s, self._writing_steps = 0.0, 0

    def saw_failure(self, *, lived_s: float = 0.0) -> None:
        """The run had to start again; before that it lived for `lived_s` that were not told."""
        self.failures += 1
        self._earlier_s += lived_s

    def decide(self) -> Decision:
        """The interval now."""
        # By how much steps beside a save are slower, its cost says.
        seen, mtbf = self._quiet or self._steps, self.mtbf_s
        step = median(seen) if seen else 0.0
        if not self._blocked or not step:
            return Decision(
                interval_s=FIRST_STEPS * step,
                steps=FIRST_STEPS,
                bound="first",
                blocked_s=0.0,
                slowed_s=0.0,
                persist_s=0.0,
                step_s=step,
                mtbf_s=mtbf,
                failures=self.failures,
            )
        blocked, persist = median(self._blocked), median(self._persist)
        slowed = max(0.0, median(self._slowed)) if self._slowed else 0.0
        cost = blocked + slowed
        bounds: dict[Bound, float] = {"overhead": cost / self._overhead, "failures": math.sqrt(2 * cost * mtbf)}
        bound = min(bounds, key=lambda name: bounds[name])
        bounds["persist"] = persist
        if persist > bounds[bound]:
            bound = "persist"
        return Decision(
            interval_s=bounds[bound],
            steps=max(1, math.ceil(bounds[bound] / step)),
            bound=bound,
            blocked_s=blocked,
            slowed_s=slowed,
            persist_s=persist,
            step_s=step,
            mtbf_s=mtbf,
            failures=self.failures,
        )

    def state(self) -> dict[str, Any]:
        """What it has learned, as JSON can hold it."""
        series = {name: list(values) for name, values in self._series()}
        return {"seconds": self.seconds, "failures": self.failures, **series}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from the `state` of an earlier launch of the run."""
        self._earlier_s, self.failures = state["seconds"], state["failures"]
        for name, values in self._series():
            values.extend(state[name])

    def _series(self) -> Iterable[tuple[str, deque[float]]]:
        yield "steps_s", self._steps
        yield "quiet_steps_s", self._quiet
        yield "blocked_s", self._blocked
        yield "slowed_s", self._slowed
        yield "persist_s", self._persist


def write_learned(folder: Path, state: dict[str, Any], *, alive: bool, time: float) -> None:
    """Keeps the `state` of a Frequency at `time`. `alive`: the run goes on; False: it has stopped well."""
    write_sealed(folder / LEARNED, {"format": FORMAT, "alive": alive, "time": time, **state})


def read_learned(folder: Path, *, warn: Callable[[str], Any]) -> dict[str, Any] | None:
    """What was kept last; None when there is nothing, or, with a warning, nothing that can be read."""
    path = folder / LEARNED
    if not path.exists():
        return None
    try:
        return read_sealed(
            path,
            what="record of saves and failures",
            remedy="nothing need be done: `checkpoint.save_every` learns anew",
            current=FORMAT,
            sealed_since=1,
        )
    except DataError as error:
        warn(str(error))
        return None


def _mean(seconds: Iterable[float]) -> float:
    """Of steps, of which a single one may have taken very long for a reason of its own."""
    known = list(seconds)
    most = 3 * median(known)
    return fmean(min(each, most) for each in known)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
