"""Whether the CPU or the device does a stage of preparing, by what that does to the speed of the run. No torch.

Work moved to the device relieves the cores and takes time from the step, and memory that the step could have used. Both
are charged; the placement is the one with the fastest forecast. On a run whose step is the limit everything stays on
the CPU, however fast the device would be at it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .forecast import Forecast, Rates, Setup, forecast


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A stage of preparing, as decoding or resizing."""

    name: str
    core_s: float
    """Seconds of one core for a sample (or token: the unit of the rates)."""
    device_s: float = math.inf
    """Seconds of the device for it; infinite when it can only be done by the CPU."""
    device_bytes: float = 0.0
    """Memory it takes there, for a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What the step leaves of the device."""

    free_bytes: float = math.inf
    """Memory that the step does not use."""
    activation_bytes: float = math.inf
    """Memory of the step that shrinks with its microbatch."""
    fixed_share: float = 0.1
    """Part of a microbatch's time that does not shrink with its rows (launches, the update's share)."""

    def slowdown(self, wanted_bytes: float) -> float:
        """By how much a step takes longer that gives up memory for `wanted_bytes`: its microbatches get smaller by as
        much as is missing, so there are more of them. Infinite when it cannot give so much."""
        missing = max(0.0, wanted_bytes - self.free_bytes)
        if missing >= self.activation_bytes:
            return math.inf
        left = 1.0 - missing / self.activation_bytes
        return 1.0 + self.fixed_share * (1.0 / left - 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where each stage is done."""

    on_cpu: tuple[str, ...]
    on_device: tuple[str, ...]
    forecast: Forecast


WORTH = 1.01
"""A stage goes to the device only for a gain of a percent: less is noise, and the memory is gone for sure."""


def place(works: Sequence[Work], rates: Rates, setup: Setup, *, device: Device) -> Placement:
    """The fastest placement of `works`, in the order of the pipeline; `rates.prepare` is of what else the CPU does.

    What the device has begun it finishes: a stage goes there only with all that follow.
    """
    best: Placement | None = None
    for split in range(len(works), -1, -1):
        here, there = works[:split], works[split:]
        moved = charged(rates, here, there, device=device)
        if moved is None:
            break
        made = forecast(moved, setup)
        if best is None or made.tokens_per_s > WORTH * best.forecast.tokens_per_s:
            best = Placement(
                on_cpu=tuple(work.name for work in here),
                on_device=tuple(work.name for work in there),
                forecast=made,
            )
    assert best is not None, "everything on the CPU is always possible"
    return best


def charged(rates: Rates, here: Sequence[Work], there: Sequence[Work], *, device: Device) -> Rates | None:
    """The rates when the CPU does `here` and the device `there`; None when the device cannot."""
    core_s = 1.0 / rates.prepare + sum(work.core_s for work in here)
    step_s = 1.0 / rates.compute * device.slowdown(sum(work.device_bytes for work in there))
    step_s += sum(work.device_s for work in there)
    if math.isinf(step_s):
        return None
    return dataclasses.replace(rates, prepare=1.0 / core_s if core_s else math.inf, compute=1.0 / step_s)
