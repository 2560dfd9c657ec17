"""Values of item metrics with bootstrap intervals, over all items and by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropewalk.base.metric import SHARE, Metric

from ..intervals import LEVEL, proportion
from .item_metric import Floats, ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item

RESAMPLES = 1000
_AT_ONCE = 1 << 22
"""Numbers drawn at a time, which bounds memory."""


def measured(metric: ItemMetric, items: Sequence[Item], *, seed: int = 0) -> list[Metric]:
    """The metric over all items, then of each group where there are several; empty if no item counts.

    The interval is a percentile bootstrap over items, of a proportion the Wilson score interval.
    """
    metric = metric.for_items(items)
    rows = [(item.question.group, metric.statistics(item)) for item in items]
    found = [(group, row) for group, row in rows if row is not None]
    if not found:
        return []
    table_IK = np.array([row for _, row in found], np.float64)
    groups = [group for group, _ in found]
    names = sorted({group for group in groups if group})
    parts = [] if len(names) < 2 else [(name, np.array([group == name for group in groups])) for name in names]
    whole = [_measured(metric, table_IK, seed=seed)]
    return whole + [_measured(metric, table_IK[here], group=name, seed=seed) for name, here in parts]


def _measured(metric: ItemMetric, table_IK: Floats, *, group: str = "", seed: int) -> Metric:
    described = {"of": metric.of, "better": metric.better, "note": metric.note, "signature": metric.signature}
    if _is_proportion(metric, table_IK):
        return proportion(metric.name, int(table_IK[:, 0].sum()), len(table_IK), group=group, **described)
    value = float(metric.value(table_IK.sum(0)))
    interval = bootstrap(metric, table_IK, seed=seed)
    return Metric(metric.name, value, interval, n=len(table_IK), unit=metric.unit, group=group, **described)  # type: ignore[arg-type]


def bootstrap(metric: ItemMetric, table_IK: Floats, *, seed: int = 0) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the metric over the rows of `table_IK`; None for fewer than two."""
    if len(table_IK) < 2:
        return None
    values = metric.value(resampled_sums(table_IK, seed=seed))
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def resampled_sums(table_IK: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """Sums of rows drawn with replacement, resamples K. The same seed and number of rows draw the same rows."""
    count = len(table_IK)
    draw, left, parts = np.random.default_rng(seed), resamples, []
    while left:
        rows = min(left, max(1, _AT_ONCE // count))
        parts.append(draw.multinomial(count, np.full(count, 1 / count), size=rows) @ table_IK)
        left -= rows
    return np.concatenate(parts)


def _is_proportion(metric: ItemMetric, table_IK: Floats) -> bool:
    """Whether each item counts as 0 or 1 of 1."""
    plain = metric.unit == SHARE and type(metric).value is ItemMetric.value and table_IK.shape[1] == 2
    return bool(plain and (table_IK[:, 1] == 1).all() and np.isin(table_IK[:, 0], (0, 1)).all())
