"""95 % intervals: percentile bootstrap over documents, and the Wilson score interval of a proportion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.metric import SHARE, Metric

RESAMPLES = 1000
LEVEL = 0.95
LEAST_DOCUMENTS = 2
_AT_ONCE = 1 << 22
"""Numbers drawn at a time, which bounds memory."""
_Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""

Interval = tuple[float, float]


def intervals(
    nats: npt.NDArray[np.float64],
    *,
    sizes: Sequence[int],
    tokens: npt.NDArray[np.int64],
    correct: npt.NDArray[np.int64],
) -> Mapping[str, Interval] | None:
    """Bootstrap 95 % intervals of `bits_per_byte`, `loss` and `accuracy` over whole documents; None for fewer than two.

    Deterministic. They do not cover variance between training runs: measure that with another `train.seed`.
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


def proportion(name: str, successes: int, n: int, **described: Any) -> Metric:
    """The proportion of `successes` with its Wilson score interval; `described` are further metric fields."""
    return Metric(name, successes / n, wilson(successes / n, n), n=n, unit=SHARE, **described)


def wilson(share: float, n: float) -> Interval:
    """The Wilson score interval of a share of `n`, which need not be whole."""
    centre = share + _Z * _Z / (2 * n)
    margin = _Z * math.sqrt(share * (1 - share) / n + _Z * _Z / (4 * n * n))
    low, high = ((centre + sign * margin) / (1 + _Z * _Z / n) for sign in (-1, 1))
    # Exact bounds, without rounding error.
    return 0.0 if share == 0 else low, 1.0 if share == 1 else high
