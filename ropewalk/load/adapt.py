"""Retunes the reading during the run: one setting at a time, kept when the steps then wait less, taken back when not.

A climb on measured waiting. The cause of most of the waiting says which settings may help; one of them is doubled, the
next interval passes while it takes hold, the one after that is compared with the one before the change. What did not
help rests, each time twice as long. Nothing is tried while waiting is not worth it. Batches do not depend on any of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .stalls import Cause, binding_cause

WORTH = 0.01
"""Share of the time that must be lost in waiting before anything is tried."""
GAIN = 0.1
"""Part of the waiting that a change has to take away to be kept: intervals differ by some per cent by themselves."""
LEAST_BATCHES = 20
"""Batches of an interval from which waiting is judged; shorter intervals are taken together."""
FIRST_REST = 8
"""Intervals for which a setting rests after it did not help the first time."""


@dataclass(slots=True)
class Knob:
    """A setting that may be changed during the run."""

    name: str
    value: int
    most: int
    causes: tuple[Cause, ...]
    """Causes of waiting that more of it may lessen."""
    apply: Callable[[int], None]
    rests: int = 0
    """Intervals for which it is not tried."""
    next_rest: int = FIRST_REST


@dataclass(frozen=True, slots=True)
class _Trial:
    """A change that is being judged."""

    knob: Knob
    before: int
    wait_s: float
    """What a batch was waited for before it."""
    step_s: float
    """What a step took before it, with the waiting."""
    settled: bool = False


class Adapt:
    """Changes `knobs` by what `observe` is told; one is being tried at a time, in their order."""

    def __init__(self, knobs: Sequence[Knob]) -> None:
        self._knobs = list(knobs)
        self._sum: dict[str, float] = {}
        self._trial: _Trial | None = None

    def observe(self, figures: Mapping[str, float]) -> dict[str, Any] | None:
        """Takes in an interval of `Stalls.take`; what was changed because of it, as the fields of an event.

        `action` is `try`, `keep` or `take_back`. The last two carry what a batch was waited for before and after, and
        the gain in speed.
        """
        self._sum = {name: self._sum.get(name, 0.0) + value for name, value in figures.items()}
        if self._sum["batches"] < LEAST_BATCHES or self._sum["elapsed_s"] <= 0:
            return None
        interval, self._sum = self._sum, {}
        for knob in self._knobs:
            knob.rests = max(0, knob.rests - 1)
        wait_s, step_s = interval["wait_s"] / interval["batches"], interval["elapsed_s"] / interval["batches"]
        if self._trial is None:
            return self._try(binding_cause(interval), wait_s, step_s)
        if not self._trial.settled:
            self._trial = dataclasses.replace(self._trial, settled=True)
            return None
        return self._judge(self._trial, wait_s, step_s)

    def _try(self, cause: Cause, wait_s: float, step_s: float) -> dict[str, Any] | None:
        fit = [k for k in self._knobs if cause in k.causes and k.value < k.most and not k.rests]
        if wait_s < WORTH * step_s or not fit:
            return None
        knob = fit[0]
        self._trial = _Trial(knob, knob.value, wait_s, step_s)
        _set(knob, min(knob.most, 2 * knob.value))
        return {"action": "try", "setting": knob.name, "from": self._trial.before, "to": knob.value, "cause": cause}

    def _judge(self, trial: _Trial, wait_s: float, step_s: float) -> dict[str, Any]:
        self._trial = None
        knob, tried = trial.knob, trial.knob.value
        kept = wait_s < trial.wait_s * (1 - GAIN)
        if kept:
            knob.next_rest = FIRST_REST
        else:
            _set(knob, trial.before)
            knob.rests, knob.next_rest = knob.next_rest, 2 * knob.next_rest
        return {
            "action": "keep" if kept else "take_back",
            "setting": knob.name,
            "from": trial.before if kept else tried,
            "to": knob.value,
            "wait_s_before": trial.wait_s,
            "wait_s_after": wait_s,
            "gain": trial.step_s / step_s - 1,
        }


def _set(knob: Knob, value: int) -> None:
    knob.value = value
    knob.apply(value)
