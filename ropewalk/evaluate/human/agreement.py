"""Agreement between raters: Krippendorff's alpha, Fleiss' kappa, Cohen's kappa, with bootstrap intervals over items.

Krippendorff (2011), Computing Krippendorff's Alpha-Reliability; Fleiss (1971), Measuring nominal scale agreement among
many raters; Cohen (1960), A coefficient of agreement for nominal scales. 1 is full agreement, 0 what chance gives,
below 0 is systematic disagreement. Intervals resample items (Zapf et al. 2016).

Shapes: R raters, U items (units), V values, B resamples. Missing ratings are nan.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..intervals import LEVEL, RESAMPLES, Interval
from .rating_form import Level

Floats = npt.NDArray[np.float64]


def krippendorff_alpha(ratings_RU: Floats, level: Level) -> float | None:
    """Alpha; None where it is not defined: no item with two ratings, or one value everywhere."""
    values_V, counts_UV = _counts(ratings_RU)
    if not len(counts_UV):
        return None
    return _defined(_alpha(_coincidences(counts_UV).sum(0)[None], values_V, level)[0])


def alpha_interval(ratings_RU: Floats, level: Level, *, seed: int = 0) -> Interval | None:
    """The 95 % bootstrap interval of alpha over items; None for fewer than two."""
    values_V, counts_UV = _counts(ratings_RU)
    if len(counts_UV) < 2:
        return None
    coincidences_UW = _coincidences(counts_UV).reshape(len(counts_UV), -1)
    sums_BVV = (_resampled(len(counts_UV), seed) @ coincidences_UW).reshape(-1, len(values_V), len(values_V))
    return quantiles(_alpha(sums_BVV, values_V, level))


def fleiss_kappa(ratings_RU: Floats) -> float | None:
    """Kappa over the items that all raters have rated; None without any, or with one value everywhere."""
    counts_UV = _complete(ratings_RU)
    if not len(counts_UV):
        return None
    return _defined(_kappa(np.ones((1, len(counts_UV))), counts_UV)[0])


def fleiss_interval(ratings_RU: Floats, *, seed: int = 0) -> Interval | None:
    """The 95 % bootstrap interval of `fleiss_kappa` over items; None for fewer than two."""
    counts_UV = _complete(ratings_RU)
    return None if len(counts_UV) < 2 else quantiles(_kappa(_resampled(len(counts_UV), seed), counts_UV))


def cohen_kappa(first_U: Floats, second_U: Floats) -> float | None:
    """Kappa of two raters over the items that both have rated."""
    both = ~np.isnan(first_U) & ~np.isnan(second_U)
    first, second = first_U[both], second_U[both]
    if not len(first):
        return None
    by_chance = sum(float((first == value).mean() * (second == value).mean()) for value in np.unique(first))
    return None if by_chance == 1 else (float((first == second).mean()) - by_chance) / (1 - by_chance)


def quantiles(drawn_B: Floats) -> Interval | None:
    """The 95 % percentile interval of bootstrap values; None without a defined one."""
    defined = drawn_B[np.isfinite(drawn_B)]
    if not len(defined):
        return None
    low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _counts(ratings_RU: Floats) -> tuple[Floats, Floats]:
    """(values, how often each item got each value) of the items with at least two ratings."""
    pairable = (~np.isnan(ratings_RU)).sum(0) >= 2
    kept_RU = ratings_RU[:, pairable]
    values_V = np.unique(kept_RU[~np.isnan(kept_RU)])
    return values_V, (kept_RU[:, :, None] == values_V).sum(0).astype(float)


def _coincidences(counts_UV: Floats) -> npt.NDArray[np.float64]:
    """Pairs of values within each item, each item weighted by 1 / (its ratings - 1), as items x V x V."""
    pairs_UVV = counts_UV[:, :, None] * counts_UV[:, None, :]
    diagonal = np.arange(counts_UV.shape[1])
    pairs_UVV[:, diagonal, diagonal] -= counts_UV
    return pairs_UVV / (counts_UV.sum(1) - 1)[:, None, None]


def _alpha(coincidences_BVV: Floats, values_V: Floats, level: Level) -> Floats:
    """1 - observed / expected disagreement, of each coincidence matrix; nan where one value is everywhere."""
    totals_BV = coincidences_BVV.sum(2)
    apart_BVV = _METRICS[level](values_V, totals_BV)
    observed_B = (coincidences_BVV * apart_BVV).sum((1, 2))
    expected_B = (totals_BV[:, :, None] * totals_BV[:, None, :] * apart_BVV).sum((1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        return 1 - (totals_BV.sum(1) - 1) * observed_B / expected_B


def _nominal(values_V: Floats, totals_BV: Floats) -> Floats:
    return (values_V[:, None] != values_V).astype(float)[None]


def _ordinal(values_V: Floats, totals_BV: Floats) -> Floats:
    """(ratings from c to k, those of c and k counted half)^2."""
    middle_BV = totals_BV.cumsum(1) - totals_BV / 2
    return (middle_BV[:, :, None] - middle_BV[:, None, :]) ** 2


def _interval(values_V: Floats, totals_BV: Floats) -> Floats:
    return ((values_V[:, None] - values_V) ** 2)[None]


def _ratio(values_V: Floats, totals_BV: Floats) -> Floats:
    sums = values_V[:, None] + values_V
    return (np.divide(values_V[:, None] - values_V, sums, out=np.zeros_like(sums), where=sums != 0) ** 2)[None]


_METRICS: dict[Level, Callable[[Floats, Floats], Floats]] = {
    "nominal": _nominal,
    "ordinal": _ordinal,
    "interval": _interval,
    "ratio": _ratio,
}


def _complete(ratings_RU: Floats) -> Floats:
    """Counts of values of the items that all raters have rated."""
    if len(ratings_RU) < 2:
        return np.zeros((0, 0))
    return _counts(ratings_RU[:, ~np.isnan(ratings_RU).any(0)])[1]


def _kappa(weights_BU: Floats, counts_UV: Floats) -> Floats:
    raters = counts_UV[0].sum()
    agreeing_U = ((counts_UV**2).sum(1) - raters) / (raters * (raters - 1))
    items_B = weights_BU.sum(1)
    observed_B = weights_BU @ agreeing_U / items_B
    by_chance_B = (((weights_BU @ counts_UV) / (raters * items_B)[:, None]) ** 2).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (observed_B - by_chance_B) / (1 - by_chance_B)


def _resampled(units: int, seed: int) -> Floats:
    """How often each of `units` is drawn, in each resample."""
    draw = np.random.default_rng(seed)
    return draw.multinomial(units, np.full(units, 1 / units), size=RESAMPLES).astype(float)


def _defined(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
