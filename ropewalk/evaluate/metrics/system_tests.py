"""Significance of the difference of two systems on the same items, for metrics of summed statistics.

BLEU of a test set is no mean over sentences, so tests of means do not apply. Both tests below resample the table of
statistics and compute the metric anew: paired bootstrap resampling (Koehn 2004; Riezler and Maxwell 2005) and
approximate randomization (Noreen 1989). The latter is two-sided and assumes nothing about the test set as a sample.
Shapes: I items, K statistics, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from ropewalk.base.errors import UserError

from ..intervals import LEVEL
from .item_metric import Floats, ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item

_AT_ONCE = 1 << 18
"""Numbers drawn at a time: what fits a processor's cache is four times as fast as 1 << 22."""
RESAMPLES = 10_000
SWAPS = 50_000
"""Standard error of a p-value near 0.5: 0.002."""
_EQUAL = 1e-9
"""Differences of a metric this close are equal: sums in another order round differently."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemTest:
    """System B against system A under one metric."""

    test: Literal["paired bootstrap", "approximate randomization"]
    difference: float
    """Value of B minus value of A."""
    interval: tuple[float, float]
    """95 % interval of the difference, by paired bootstrap."""
    p_value: float
    resamples: int
    n: int


def paired_bootstrap(
    metric: ItemMetric, table_a_IK: Floats, table_b_IK: Floats, *, resamples: int = RESAMPLES, seed: int = 0
) -> SystemTest:
    """Draws items with replacement, the same ones for both systems.

    The p-value is that of Moses and sacrebleu: how often the size of the difference exceeds its mean over the resamples
    by the observed size. It is about half of a two-sided one where systems differ.
    """
    difference, drawn_R = _observed(metric, table_a_IK, table_b_IK, resamples=resamples, seed=seed)
    sizes = np.abs(drawn_R)
    p_value = _p_value(sizes - sizes.mean(), abs(difference))
    return _system_test("paired bootstrap", difference, drawn_R, p_value, resamples=resamples, n=len(table_a_IK))


def approximate_randomization(
    metric: ItemMetric, table_a_IK: Floats, table_b_IK: Floats, *, resamples: int = SWAPS, seed: int = 0
) -> SystemTest:
    """Swaps the two systems' outputs of random items: the share of swaps with a difference as large as observed."""
    difference, drawn_R = _observed(metric, table_a_IK, table_b_IK, resamples=RESAMPLES, seed=seed)
    sum_a_K, sum_b_K, moved_IK, count = table_a_IK.sum(0), table_b_IK.sum(0), table_b_IK - table_a_IK, len(table_a_IK)
    draw, sizes = np.random.default_rng(seed), []
    for rows in _parts(resamples, count):
        packed = draw.integers(256, size=(rows, (count + 7) // 8), dtype=np.uint8)
        moved_RK = np.unpackbits(packed, axis=1, count=count).astype(np.float64) @ moved_IK
        sizes.append(np.abs(metric.value(sum_b_K - moved_RK) - metric.value(sum_a_K + moved_RK)))
    p_value = _p_value(np.concatenate(sizes), abs(difference))
    return _system_test("approximate randomization", difference, drawn_R, p_value, resamples=resamples, n=count)


def statistics_tables(
    metric: ItemMetric, items_a: Sequence[Item], items_b: Sequence[Item]
) -> tuple[ItemMetric, Floats, Floats]:
    """The metric as it counts these items, and the statistics of both systems on the items that count for both."""
    if [item.question.key for item in items_a] != [item.question.key for item in items_b]:
        raise UserError(f"{metric.name}: the two systems answered different questions; evaluate both on the same ones")
    metric = metric.for_items(items_a)
    pairs = [(metric.statistics(a), metric.statistics(b)) for a, b in zip(items_a, items_b, strict=True)]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    tables = np.array(both, np.float64).reshape(len(both), 2, -1)
    return metric, tables[:, 0], tables[:, 1]


def _observed(
    metric: ItemMetric, table_a_IK: Floats, table_b_IK: Floats, *, resamples: int, seed: int
) -> tuple[float, Floats]:
    """The difference, and the differences of resamples."""
    if table_a_IK.shape != table_b_IK.shape or not len(table_a_IK):
        raise UserError(f"{metric.name}: a paired test needs the same items of both systems, at least one")
    a, b = (metric.value(table.sum(0)) for table in (table_a_IK, table_b_IK))
    both_IK, count = np.hstack([table_a_IK, table_b_IK]), len(table_a_IK)
    draw, drawn = np.random.default_rng(seed), []
    for rows in _parts(resamples, count):
        # Counting uniform draws is eight times as fast as drawing multinomial counts.
        flat = draw.integers(count, size=(rows, count)) + count * np.arange(rows)[:, None]
        times_RI = np.bincount(flat.ravel(), minlength=rows * count).reshape(rows, count)
        of_a, of_b = (metric.value(part) for part in np.hsplit(times_RI.astype(np.float64) @ both_IK, 2))
        drawn.append(of_b - of_a)
    return float(b - a), np.concatenate(drawn)


def _parts(resamples: int, count: int) -> Iterator[int]:
    """How many resamples of `count` items to draw at a time."""
    at_once = max(1, _AT_ONCE // count)
    for start in range(0, resamples, at_once):
        yield min(at_once, resamples - start)


def _p_value(sizes_R: Floats, observed: float) -> float:
    """The share of resamples as extreme as observed, the observation counted among them: never 0."""
    return float((np.count_nonzero(sizes_R >= observed - _EQUAL) + 1) / (len(sizes_R) + 1))


def _system_test(
    test: Literal["paired bootstrap", "approximate randomization"],
    difference: float,
    drawn_R: Floats,
    p_value: float,
    *,
    resamples: int,
    n: int,
) -> SystemTest:
    low, high = np.quantile(drawn_R[np.isfinite(drawn_R)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return SystemTest(
        test=test,
        difference=difference,
        interval=(float(low), float(high)),
        p_value=p_value,
        resamples=resamples,
        n=n,
    )
