"""Maps values to pixels and chooses ticks.

Ticks are 1, 2 or 5 times a power of ten, inside the range, and never more than requested.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["linear", "log"]

_NEAR = 1e-9
"""Ranges narrower than this share of their ends are treated as a single value."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low`..`high` onto the pixels `start`..`end`; a `log` scale needs `low > 0`."""

    low: float
    high: float
    start: float
    end: float
    kind: Kind = "linear"

    def __call__(self, value: float) -> float:
        """The pixel of `value`; the middle if the range is a single value."""
        low, high, at = (
            (self.low, self.high, value)
            if self.kind == "linear"
            else (math.log(self.low), math.log(self.high), math.log(max(value, self.low)))
        )
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[float]:
        """At most `most` nice values inside the range, in increasing order."""
        find = log_ticks if self.kind == "log" else linear_ticks
        return find(self.low, self.high, most)


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """The multiples of the smallest nice step that are at most `most`; `[low]` for a range of one value."""
    span = high - low
    if span <= _NEAR * max(abs(low), abs(high)) or span / most < 1e-300:
        return [low]
    exponent = math.floor(math.log10(span / most))
    for power in (exponent, exponent + 1):
        for factor in (1, 2, 5):
            ticks = _multiples(low, high, factor, power)
            if len(ticks) <= most:
                return ticks
    return [low]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with twos and fives if they fit; linear ticks within less than a decade."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [_scaled(f, e) for e in range(first, last + 1) for f in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if 2 <= len(inside) <= most:
            return inside
    decades = [_scaled(1, e) for e in range(first, last + 1)]
    inside = [tick for tick in decades if low <= tick <= high]
    if len(inside) > most:
        return inside[:: math.ceil(len(inside) / most)]
    return linear_ticks(low, high, most)


def tick_labels(ticks: list[float]) -> list[str]:
    """The ticks as the shortest exact text; one prefix for all unless they span decades.

    Below 10 000 a shared step of thousands is written out: 1000, 1500, 2000.
    """
    sizes = [abs(tick) for tick in ticks if tick]
    largest = max(sizes, default=0.0)
    if largest < 1e-3:
        return [_power(tick) for tick in ticks]
    if len(sizes) == len(ticks) and largest > 50 * min(sizes):
        return [_prefixed(tick, abs(tick)) for tick in ticks]
    return [_prefixed(tick, largest if largest >= 1e4 else 1.0) for tick in ticks]


def padded(low: float, high: float, share: float = 0.05) -> tuple[float, float]:
    """The range with a margin of `share` on both sides; a single value gets a range around it."""
    margin = (high - low) * share or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _multiples(low: float, high: float, factor: int, power: int) -> list[float]:
    step = _scaled(factor, power)
    numbers = range(math.ceil(low / step) - 1, math.floor(high / step) + 2)
    return [tick for n in numbers if low <= (tick := _scaled(n * factor, power)) <= high]


def _scaled(whole: int, power: int) -> float:
    """`whole * 10**power`, correctly rounded: 0.3 and not 0.30000000000000004."""
    return float(whole * 10**power) if power >= 0 else whole / 10**-power


def _prefixed(value: float, size: float) -> str:
    """`value` with the prefix that suits a number of `size`."""
    for factor, prefix in ((1e18, " E"), (1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if size >= factor:
            return f"{value / factor:.6g}{prefix if value else ''}"
    return f"{value:.6g}"


def _power(value: float) -> str:
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"
