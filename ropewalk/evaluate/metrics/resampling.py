"""Values of item metrics with bootstrap intervals, over all items and by group."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ropewalk.base.metric import SHARE, Metric

from ..intervals import LEVEL, proportion
from .item_metric import Floats, ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item

RESAMPLES = 1000
TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
"""The ends of an interval as quantiles."""
_AT_ONCE = 1 << 22
"""Numbers drawn at a time, which bounds memory."""

_log = logging.getLogger(__name__)


def measured(metric: ItemMetric, items: Sequence[Item], *, seed: int = 0) -> list[Metric]:
    """The metric over all items, then of each group where there are several; empty if no item counts or the value is
    not finite (a warning says so).

    The interval is a bootstrap over items (`ends`), of a proportion the Wilson score interval.
    """
    metric = metric.for_items(items)
    own = metric.measure(items, seed=seed)
    if own is not None:
        return own
    rows = [(item.question.group, metric.statistics(item)) for item in items]
    found = [(group, row) for group, row in rows if row is not None]
    if not found:
        return []
    table_IK = np.array([row for _, row in found], np.float64)
    groups = [group for group, _ in found]
    names = sorted({group for group in groups if group})
    parts = [] if len(names) < 2 else [(name, np.array([group == name for group in groups])) for name in names]
    whole = _measured(metric, table_IK, seed=seed)
    if whole is None:
        return []
    by_group = [_measured(metric, table_IK[here], group=name, seed=seed) for name, here in parts]
    return [whole, *(part for part in by_group if part is not None)]


def _measured(metric: ItemMetric, table_IK: Floats, *, group: str = "", seed: int) -> Metric | None:
    described = {"of": metric.of, "better": metric.better, "note": metric.note, "signature": metric.signature}
    if _is_proportion(metric, table_IK):
        return proportion(metric.name, int(table_IK[:, 0].sum()), len(table_IK), group=group, **described)
    value = value_of(metric, table_IK)
    if not np.isfinite(value):
        where = f" of {group}" if group else ""
        _log.warning("metric `%s`%s is %s over %d items and is left out", metric.name, where, value, len(table_IK))
        return None
    interval = bootstrap(metric, table_IK, seed=seed)
    return Metric(metric.name, value, interval, n=len(table_IK), unit=metric.unit, group=group, **described)  # type: ignore[arg-type]


def value_of(metric: ItemMetric, table_IK: Floats) -> float:
    """The metric with each row counted once."""
    with np.errstate(all="ignore"):
        return float(metric.weighted(table_IK, np.ones((1, len(table_IK))))[0])


def bootstrap(metric: ItemMetric, table_IK: Floats, *, seed: int = 0) -> tuple[float, float] | None:
    """The bootstrap interval of the metric over the rows of `table_IK`; None for fewer than two, or if it is not finite
    in a resample."""
    if len(table_IK) < 2:
        return None
    with np.errstate(all="ignore"):
        values = np.concatenate([metric.weighted(table_IK, counts) for counts in draws(len(table_IK), seed=seed)])
    return ends(values, value=value_of(metric, table_IK), noise=metric.noise(table_IK, seed=seed))


def ends(values: Floats, *, value: float, noise: Floats | None = None) -> tuple[float, float] | None:
    """The 95 % interval from resampled values: their percentiles; None if they are not finite.

    For a value that noise raises, percentiles of resamples, which have that noise twice, lie above the truth: they are
    reversed around the value (Davison and Hinkley 1997, section 5.2). The interval begins at 0 unless the value exceeds
    the 97.5 % quantile of `noise`, the values that chance alone gives.
    """
    finite = values[np.isfinite(values)]
    if len(finite) < LEVEL * len(values):
        return None
    low, high = (float(end) for end in np.quantile(finite, TAILS))
    if noise is None:
        return low, high
    by_chance = value <= np.quantile(noise, TAILS[1])
    return 0.0 if by_chance else max(0.0, min(value, 2 * value - high)), max(value, 2 * value - low)


def draws(count: int, *, seed: int = 0, resamples: int = RESAMPLES) -> Iterator[npt.NDArray[np.int64]]:
    """How often each of `count` items is drawn with replacement, in parts of the resamples. The same seed and count
    draw the same items."""
    draw, left = np.random.default_rng(seed), resamples
    while left:
        rows = min(left, max(1, _AT_ONCE // count))
        # Counting drawn items takes a tenth of the time of a multinomial draw.
        drawn = draw.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        yield np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)
        left -= rows


def resampled_sums(table_IK: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """Sums of rows drawn with replacement, resamples K. The same seed and number of rows draw the same rows."""
    return np.concatenate([counts @ table_IK for counts in draws(len(table_IK), seed=seed, resamples=resamples)])


def _is_proportion(metric: ItemMetric, table_IK: Floats) -> bool:
    """Whether each item counts as 0 or 1 of 1."""
    kind = type(metric)
    summed = kind.value is ItemMetric.value and kind.weighted is ItemMetric.weighted
    plain = metric.unit == SHARE and summed and table_IK.shape[1] == 2
    return bool(plain and (table_IK[:, 1] == 1).all() and np.isin(table_IK[:, 0], (0, 1)).all())
