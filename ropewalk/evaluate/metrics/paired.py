"""Paired comparison of two models on the same items: difference, interval, p-value.

Scores of the same items go up and down together, so that a paired test sees differences which two separate intervals
hide. The null hypothesis is that swapping the models' scores on any item changes nothing: the permutation test flips
the signs of the differences (Fisher 1935). Of scores 0 and 1 it is the exact test of McNemar (1947).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .resampling import RESAMPLES, TAILS, resampled_sums

EXACT = 20
"""All sign flips are tried for up to this many items whose scores differ."""
FLIPS = 20_000
"""Random sign flips for more."""
_AT_ONCE = 1 << 24
"""Signs drawn at a time, which bounds memory."""
_EQUAL = 1e-9
"""Relative: sums in another order round differently."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """The second model against the first."""

    difference: float
    interval: tuple[float, float] | None
    """95 % bootstrap interval over items; None for fewer than two."""
    p_value: float
    """Two-sided."""
    test: str
    n: int


def paired(
    first: Sequence[float], second: Sequence[float], *, sizes: Sequence[float] | None = None, seed: int = 0
) -> Paired:
    """Compares scores of the same items, in the same order, by their mean; with `sizes` by their sum per unit of size,
    as bits are per byte."""
    gained = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    weights = np.ones(len(gained)) if sizes is None else np.asarray(sizes, np.float64)
    table_IK = np.column_stack([gained, weights])
    interval = None
    if len(gained) > 1:
        resamples = max(RESAMPLES, min(10 * RESAMPLES, _AT_ONCE // len(gained)))
        sums = resampled_sums(table_IK, seed=seed, resamples=resamples)
        low, high = np.quantile(sums[:, 0] / sums[:, 1], TAILS)
        interval = float(low), float(high)
    test, p_value = _test(gained, binary=bool(np.isin([*first, *second], (0, 1)).all()), seed=seed)
    difference = float(gained.sum() / weights.sum())
    return Paired(difference=difference, interval=interval, p_value=p_value, test=test, n=len(gained))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm 1979): the chance that any true null hypothesis is rejected stays below
    the level, however the tests depend on each other."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


def _test(gained: Floats, *, binary: bool, seed: int) -> tuple[str, float]:
    differing = gained[gained != 0]
    if binary:
        return "McNemar, exact", _sign_test(int((differing > 0).sum()), len(differing))
    if len(differing) <= EXACT:
        return "permutation, exact", _all_flips(differing)
    return f"permutation, {FLIPS} flips", _random_flips(differing, seed=seed)


def _sign_test(gains: int, n: int) -> float:
    """Twice the binomial tail of the rarer sign."""
    rarer = min(gains, n - gains)
    term = total = 1
    for k in range(1, rarer + 1):
        term = term * (n - k + 1) // k
        total += term
    return min(1.0, 2 * total / 2**n)


def _all_flips(differing: Floats) -> float:
    sums = np.zeros(1)
    for each in differing:
        sums = np.concatenate([sums + each, sums - each])
    return float((np.abs(sums) >= _reached(differing)).mean())


def _random_flips(differing: Floats, *, seed: int) -> float:
    """The observed signs count among the flips, so that p is never 0."""
    draw, left, extreme, count = np.random.default_rng(seed), FLIPS, 1, len(differing)
    while left:
        rows = min(left, max(1, _AT_ONCE // count))
        bits = np.unpackbits(draw.integers(256, size=(rows, -(-count // 8)), dtype=np.uint8), axis=1)[:, :count]
        extreme += int((np.abs(2 * (bits @ differing) - differing.sum()) >= _reached(differing)).sum())
        left -= rows
    return extreme / (FLIPS + 1)


def _reached(differing: Floats) -> float:
    return abs(math.fsum(differing)) - _EQUAL * float(np.abs(differing).sum())
