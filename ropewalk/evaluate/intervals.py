"""How far what was measured would move with other held-out documents of the same kind: percentile bootstrap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
LEVEL = 0.95
LEAST_DOCUMENTS = 2
_AT_ONCE = 1 << 22
"""Counts that are held in memory."""

Interval = tuple[float, float]


def intervals(
    nats: npt.NDArray[np.float64],
    *,
    sizes: Sequence[int],
    tokens: npt.NDArray[np.int64],
    correct: npt.NDArray[np.int64],
) -> Mapping[str, Interval] | None:
    """95 % intervals of `bits_per_byte`, `loss` and `accuracy` over documents drawn whole; None of fewer than two.

    The same documents give the same intervals. They say nothing about another training run: for that, train with
    another `train.seed`.
    """
    count = len(sizes)
    if count < LEAST_DOCUMENTS:
        return None
    columns = np.stack([nats, np.asarray(sizes, float), tokens.astype(float), correct.astype(float)], axis=1)
    draw, left, parts = np.random.default_rng(0), RESAMPLES, []
    while left:
        rows = min(left, max(1, _AT_ONCE // count))
        parts.append(draw.multinomial(count, np.full(count, 1 / count), size=rows) @ columns)
        left -= rows
    sums = np.concatenate(parts)
    drawn = {
        "bits_per_byte": sums[:, 0] / math.log(2) / sums[:, 1],
        "loss": sums[:, 0] / sums[:, 2],
        "accuracy": sums[:, 3] / sums[:, 2],
    }
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    return {name: (float(low), float(high)) for name, (low, high) in _quantiles(drawn, tails)}


def _quantiles(drawn: Mapping[str, npt.NDArray[np.float64]], tails: list[float]) -> list[tuple[str, list[float]]]:
    return [(name, np.quantile(values, tails).tolist()) for name, values in drawn.items()]
