"""Selective accuracy: how accurate a model is on the questions that it is surest of (Geifman and El-Yaniv 2017).

Questions are answered in order of confidence. Equal confidences have no order: the expected value over all orders of
them counts, so that no result depends on the order of the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import UserError
from ropewalk.base.metric import SHARE, Metric

from ..intervals import wilson
from .choices import Length, forecast
from .item_metric import Floats, ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item

COVERAGES = (0.25, 0.5, 0.75)


class _ByConfidence(ItemMetric):
    """A metric of items in order of confidence. Rows: confidence, whether it is right."""

    def __init__(self, *, length: Length = "", delimiter: str = " ") -> None:
        self.length, self.delimiter = length, delimiter
        self.signature = f"softmax of log-likelihood{f' per {length[:-1]}' if length else ''}"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        found = forecast(item, self.length, metric=self.name, delimiter=self.delimiter)
        return (found.confidence, float(found.correct)) if found else None

    def score(self, item: Item) -> None:
        """No item has a coverage of its own."""


class SelectiveAccuracy(_ByConfidence):
    """Accuracy on the surest share of the questions: `acc_at_25`, `acc_at_50`, `acc_at_75`."""

    name = "selective_acc"
    unit = SHARE

    def __init__(self, *, coverages: Sequence[float] = COVERAGES, length: Length = "", delimiter: str = " ") -> None:
        super().__init__(length=length, delimiter=delimiter)
        if not coverages or not all(0 < coverage <= 1 for coverage in coverages):
            raise UserError(f"metric `selective_acc`: coverages {list(coverages)}; set shares above 0 and up to 1")
        self.coverages = tuple(coverages)

    def measure(self, items: Sequence[Item], *, seed: int) -> list[Metric]:
        found = [(item.question.group, row) for item in items if (row := self.statistics(item)) is not None]
        if not found:
            return []
        groups = np.array([group for group, _ in found])
        table_IK = np.array([row for _, row in found])
        names = sorted({group for group, _ in found if group})
        parts = {"": table_IK} | ({name: table_IK[groups == name] for name in names} if len(names) > 1 else {})
        return [self._at(coverage, part, group=name) for coverage in self.coverages for name, part in parts.items()]

    def _at(self, coverage: float, table_IK: Floats, *, group: str) -> Metric:
        """With the interval of a proportion of the questions answered."""
        ((n, right),) = _answered(table_IK, np.ones((1, len(table_IK))))
        answered = coverage * float(n[-1])
        value = float(np.interp(answered, n, right) / answered)
        described = {"n": len(table_IK), "of": self.of, "signature": self.signature, "group": group}
        return Metric(f"acc_at_{100 * coverage:g}", value, wilson(value, answered), unit=SHARE, **described)  # type: ignore[arg-type]


class RiskCoverage(_ByConfidence):
    """Area under the risk-coverage curve (AURC): the mean, over k, of the share of wrong answers among the k surest."""

    name = "aurc"
    better = "lower"

    def weighted(self, table_IK: Floats, counts_RI: npt.NDArray[Any]) -> Floats:
        def area(n: Floats, right: Floats) -> float:
            first_k = np.arange(1, round(n[-1]) + 1)
            return float(np.mean(1 - np.interp(first_k, n, right) / first_k))

        return np.array([area(n, right) for n, right in _answered(table_IK, counts_RI)])


def _answered(table_IK: Floats, counts_RI: npt.NDArray[Any]) -> list[tuple[Floats, Floats]]:
    """Of each sample, the answered and the right items as confidence falls, at the ends of ties, from 0 on."""
    order = np.argsort(-table_IK[:, 0], kind="stable")
    confidence_I, right_I = table_IK[order].T
    last_of_ties = np.flatnonzero(np.append(np.diff(confidence_I) < 0, True))
    found = []
    for counts_I in counts_RI[:, order]:
        answered, right = np.cumsum(counts_I)[last_of_ties], np.cumsum(counts_I * right_I)[last_of_ties]
        found.append((np.append(0.0, answered), np.append(0.0, right)))
    return found
