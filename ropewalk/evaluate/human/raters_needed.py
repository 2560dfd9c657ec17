"""How many raters a wanted precision takes: variance components of items, raters and what is left.

The model of a score is y = mean + item + rater + rest, all random and independent (two-way crossed). The mean of I
items by R raters then has the variance

    items / I + raters / R + rest / (I R).

The components are Henderson's estimates (method I, Biometrics 1953), which are unbiased for incomplete tables too: four
sums of squares are set equal to their expected values. Components below 0 are set to 0. This is the D study of
generalizability theory (Brennan 2001).

Shapes: R raters, U items; missing ratings are nan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_Z = 1.959963984540054
MOST_RATERS = 1000
"""More are as good as none: the items are the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """Variances."""

    items: float
    raters: float
    rest: float
    """Item by rater, and the rater's own inconstancy."""

    def half_width(self, *, items: int, raters: int) -> float:
        """Half of the 95 % interval of a mean."""
        return _Z * math.sqrt(self.items / items + self.raters / raters + self.rest / (items * raters))

    def raters_for(self, half_width: float, *, items: int) -> int | None:
        """The fewest raters whose mean over so many items has this half-width; None if none suffices: then more items
        are needed."""
        left = (half_width / _Z) ** 2 - self.items / items
        if left <= 0:
            return None
        # At least 1e-9 below: a quotient that is a whole number must not be rounded up.
        needed = max(1, math.ceil((self.raters + self.rest / items) / left - 1e-9))
        return needed if needed <= MOST_RATERS else None

    def items_for(self, half_width: float, *, raters: int) -> int | None:
        """The fewest items for the same with so many raters; None if none suffices: then more raters are needed."""
        left = (half_width / _Z) ** 2 - self.raters / raters
        return None if left <= 0 else max(1, math.ceil((self.items + self.rest / raters) / left - 1e-9))


def variance_components(tables: Sequence[Floats]) -> Components | None:
    """The components, pooled over tables R x U of one system each, in proportion to their ratings; None unless a table
    has two raters, two items and an item that two raters share."""
    found = [
        (int((~np.isnan(table)).sum()), estimate) for table in tables if (estimate := _estimate(table)) is not None
    ]
    if not found:
        return None
    whole = sum(count for count, _ in found)
    items, raters, rest = (max(0.0, sum(count * each[i] for count, each in found) / whole) for i in range(3))
    return Components(items=items, raters=raters, rest=rest)


def _estimate(table_RU: Floats) -> Floats | None:
    """(items, raters, rest), which may be negative."""
    there = ~np.isnan(table_RU)
    table = np.where(there, table_RU, 0.0)[there.any(1)][:, there.any(0)]
    there = there[there.any(1)][:, there.any(0)].astype(float)
    if min(there.shape) < 2 or there.sum() <= sum(there.shape):
        return None
    n, of_item, of_rater = there.sum(), there.sum(0), there.sum(1)
    by_item = (table.sum(0) ** 2 / of_item).sum()
    by_rater = (table.sum(1) ** 2 / of_rater).sum()
    whole = table.sum() ** 2 / n
    # Expected values: coefficients of the mean squared, items, raters, rest (a cell has one rating at most).
    mean = [n, (of_item**2).sum() / n, (of_rater**2).sum() / n, 1.0]
    item = [n, n, len(of_item), len(of_item)]
    rater = [n, len(of_rater), n, len(of_rater)]
    cell = [n, n, n, n]
    sums = np.array([whole, by_item, by_rater, (table**2).sum()])
    matrix = np.array([mean, item, rater, cell])
    if abs(np.linalg.det(matrix / n)) < 1e-12:
        return None
    estimate: Floats = np.linalg.solve(matrix, sums)[1:]
    return estimate
