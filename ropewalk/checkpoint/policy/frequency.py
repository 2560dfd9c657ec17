"""The save interval of `save_every = "auto"`, from the measured cost of saves. No torch.

- Budget: saves may take at most a fraction `overhead` of the training time (CheckFreq, Mohan et al. 2021), and `auto`
  saves as often as that allows, which minimizes the work lost by a failure.
- Failures: with cost C per save and mean time M between failures, the optimal interval is sqrt(2 C M) (Young 1974, Daly
  2006). It is used where it is shorter than the budget allows.
- Persistence: a snapshot would wait for the previous one to become durable, so no interval is shorter than that.

C is the time for which a save blocks training, plus the slowdown of steps while the checkpoint is written.

M is estimated from the failures of the run. The prior is one failure per 50,000 GPU hours (Llama 3: 419 in 54 days on
16,384 GPUs, i.e. 50,700), weighted as one observed failure. From the first failure on, M is the run time divided by the
number of failures if that is shorter.
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
"""File beside the checkpoints. It records whether the run is alive: a launch that finds it alive knows that the launch
before it failed."""
FORMAT = 1
GPU_HOURS_PER_FAILURE = 50_000.0
MEMORY = 16
"""Saves that medians cover."""
STEPS = 64
"""Steps without background writing that the mean covers."""
FIRST_STEPS = 10
"""Steps before the first save, which measures the cost."""
MIN_MTBF_S = 1.0
Bound = Literal["persist", "overhead", "failures", "first"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveDecision:
    """An interval, and the figures it was computed from."""

    interval_s: float
    steps: int
    bound: Bound
    """The bound that determined the interval; `first`: not measured yet."""
    blocked_s: float
    """Seconds that a save blocks training."""
    slowed_s: float
    """Total slowdown of the steps during a save."""
    persist_s: float
    step_s: float
    mtbf_s: float
    failures: int
    """Failures of the run so far."""

    @property
    def cost_s(self) -> float:
        """Training time lost per save."""
        return self.blocked_s + self.slowed_s

    def __str__(self) -> str:
        if self.bound == "first":
            return f"saving after {self.steps} steps to measure the cost"
        cost = (
            f"a save costs {self.cost_s:.3f} s ({self.blocked_s:.3f} s blocked, {self.slowed_s:.3f} s of slower steps)"
        )
        seen = f", {self.failures} failure{'s' * (self.failures != 1)} so far" if self.failures else ""
        reason = {
            "persist": f"a save takes {self.persist_s:.2f} s to become durable",
            "overhead": f"{cost}, and the budget allows no shorter interval",
            "failures": f"{cost}, with a failure expected every {_hours(self.mtbf_s)}",
        }[self.bound]
        return f"saving every {self.steps} steps ({self.interval_s:.1f} s): {reason}{seen}"


class Frequency:
    """Computes the save interval from measurements; the first save is early, to measure its cost."""

    def __init__(
        self,
        *,
        overhead: float = 0.02,
        mtbf_hours: float | None = None,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mtbf_hours`: of the whole run; None: the prior for `ranks` GPUs. Run time counts from now."""
        self._overhead, self._clock = overhead, clock
        self._prior_s = 3600 * (mtbf_hours or GPU_HOURS_PER_FAILURE / ranks)
        self._earlier_s, self._began, self.failures = 0.0, clock(), 0
        self._steps: deque[float] = deque(maxlen=MEMORY)
        self._quiet: deque[float] = deque(maxlen=STEPS)
        self._blocked: deque[float] = deque(maxlen=MEMORY)
        self._slowed: deque[float] = deque(maxlen=MEMORY)
        self._persist: deque[float] = deque(maxlen=MEMORY)
        self._writing_s, self._writing_steps = 0.0, 0

    @property
    def seconds(self) -> float:
        """Run time, including earlier launches."""
        return self._earlier_s + self._clock() - self._began

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures."""
        seconds = self.seconds
        estimate = (self._prior_s + seconds) / (1 + self.failures)
        return max(MIN_MTBF_S, min(estimate, seconds / self.failures)) if self.failures else estimate

    def saw_steps(self, seconds: float, *, steps: int = 1, writing: bool = False) -> None:
        """Records the duration of `steps` that the device has completed. `writing`: a checkpoint was being written."""
        self._steps.append(seconds / steps)
        if writing:
            self._writing_s, self._writing_steps = self._writing_s + seconds, self._writing_steps + steps
        else:
            self._quiet.append(seconds / steps)

    def saw_save(self, *, blocked_s: float, persist_s: float, inside_s: float = 0.0) -> None:
        """Records a save: seconds that training was blocked, `inside_s` of them within steps, and until durable."""
        self._blocked.append(blocked_s)
        self._persist.append(persist_s)
        if self._quiet:
            # Negative noise is kept; otherwise the median would be biased.
            self._slowed.append(self._writing_s - self._writing_steps * _mean(self._quiet) - inside_s)
        self._writing_s, self._writing_steps = 0.0, 0

    def saw_failure(self, *, lived_s: float = 0.0) -> None:
        """Records a failure, and run time of the failed launch that was not recorded yet."""
        self.failures += 1
        self._earlier_s += lived_s

    def decide(self) -> SaveDecision:
        """The current interval."""
        # Without steps during saves: their slowdown is part of the cost.
        seen, mtbf = self._quiet or self._steps, self.mtbf_s
        step = median(seen) if seen else 0.0
        if not self._blocked or not step:
            return SaveDecision(
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
        return SaveDecision(
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
        """All measurements, as JSON."""
        series = {name: list(values) for name, values in self._series()}
        return {"seconds": self.seconds, "failures": self.failures, **series}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state` of an earlier launch."""
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
    """Writes the `state` of a Frequency. `alive`: whether the run continues, or has ended without failure."""
    write_sealed(folder / LEARNED, {"format": FORMAT, "alive": alive, "time": time, **state})


def read_learned(folder: Path, *, warn: Callable[[str], Any]) -> dict[str, Any] | None:
    """The state written last; None without a file, or, with a warning, if the file is damaged."""
    path = folder / LEARNED
    if not path.exists():
        return None
    try:
        return read_sealed(
            path,
            what="record of saves and failures",
            remedy="no action needed: `checkpoint.save_every` measures again",
            current=FORMAT,
            sealed_since=1,
        )
    except DataError as error:
        warn(str(error))
        return None


def _mean(seconds: Iterable[float]) -> float:
    """Mean step time, limited to three medians per step against outliers."""
    known = list(seconds)
    most = 3 * median(known)
    return fmean(min(each, most) for each in known)


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
