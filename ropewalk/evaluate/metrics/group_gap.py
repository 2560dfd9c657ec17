"""Fairness gap: how much worse the worst group of questions fares than the best, under any metric."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropewalk.base.errors import UserError
from ropewalk.base.metric import Metric

from .item_metric import Floats, ItemMetric
from .metric_table import METRICS
from .resampling import draws, ends, value_of

if TYPE_CHECKING:
    from ..question_task import Item

_SHUFFLES = 400


class GroupGap(ItemMetric):
    """The largest difference between groups under the metric `of`, with the value of each group.

    The bootstrap resamples within groups, so that each keeps its size. Noise alone makes a gap: the interval begins at
    0 unless the gap exceeds that of shuffled groups, whose mean stands beside it (`ends`, metrics/resampling.py). A
    group counts if it has `least` items or more.
    """

    better = "lower"

    def __init__(
        self, *, of: str | ItemMetric = "acc", least: int = 2, delimiter: str | None = None, **settings: Any
    ) -> None:
        """`settings` are those of the metric `of`, a name in METRICS or a user's own `module:attr`; `delimiter` is one
        of them for metrics of choices."""
        if isinstance(of, str):
            target = METRICS[of].load()
            if delimiter is not None and "delimiter" in inspect.signature(target).parameters:
                settings["delimiter"] = delimiter
            self.metric: ItemMetric = target(**settings)
        else:
            self.metric = of
        if type(self.metric).measure is not ItemMetric.measure:
            raise UserError(f'metric `group_gap`: "{self.metric.name}" has no single value per group')
        self.least = max(1, least)
        self.name = f"{self.metric.name}_gap"
        self.unit = self.metric.unit
        self.of = "group"
        self.unconditional = self.metric.unconditional
        self.signature = "|".join(filter(None, [f"best-worst|least:{self.least}", self.metric.signature]))

    def for_items(self, items: Sequence[Item]) -> GroupGap:
        return GroupGap(of=self.metric.for_items(items), least=self.least)

    def statistics(self, item: Item) -> Sequence[float] | None:
        return self.metric.statistics(item)

    def score(self, item: Item) -> None:
        """No item has a gap of its own."""

    def measure(self, items: Sequence[Item], *, seed: int) -> list[Metric]:
        rows: dict[str, list[Sequence[float]]] = {}
        for item in items:
            row = self.statistics(item)
            if item.question.group and row is not None:
                rows.setdefault(item.question.group, []).append(row)
        tables = {name: np.array(rows[name], np.float64) for name in sorted(rows) if len(rows[name]) >= self.least}
        values = {name: value_of(self.metric, table) for name, table in tables.items()}
        values = {name: value for name, value in values.items() if np.isfinite(value)}
        if len(values) < 2:
            return []
        kept = [tables[name] for name in values]
        worst, best = sorted(values, key=values.__getitem__, reverse=self.metric.better == "lower")[:: len(values) - 1]
        gap = abs(values[best] - values[worst])
        drawn = [self._drawn(table, seed=seed + number) for number, table in enumerate(kept)]
        shuffled = self._shuffled(kept, seed=seed)
        interval = ends(np.ptp(np.array(drawn), axis=0), value=gap, noise=shuffled)
        beside = {best: values[best], worst: values[worst], "shuffled groups": float(shuffled.mean())}
        return [
            Metric(
                self.name,
                gap,
                interval,
                n=len(values),
                of=self.of,
                unit=self.unit,
                better=self.better,
                references=beside,
                signature=self.signature,
            )
        ]

    def _drawn(self, table_IK: Floats, *, seed: int) -> Floats:
        with np.errstate(all="ignore"):
            return np.concatenate([self.metric.weighted(table_IK, n) for n in draws(len(table_IK), seed=seed)])

    def _shuffled(self, tables: Sequence[Floats], *, seed: int) -> Floats:
        """Gaps when the items of all groups are dealt out anew into groups of the same sizes."""
        draw, all_IK = np.random.default_rng(seed), np.concatenate(tables)
        borders = np.cumsum([len(table) for table in tables])[:-1]
        dealt = (np.split(draw.permutation(all_IK), borders) for _ in range(_SHUFFLES))
        gaps = np.array([np.ptp([value_of(self.metric, part) for part in parts]) for parts in dealt])
        return gaps[np.isfinite(gaps)]
