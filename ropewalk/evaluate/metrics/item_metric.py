"""A metric of a task's items: a few statistics of each item, and the value of their sum.

    class ExactMatch(ItemMetric):
        name, unit = "exact_match", SHARE

        def statistics(self, item):
            return (item.predictions[0] in item.question.references, 1)

Accuracy, perplexity, BLEU, F1 and calibration errors are all functions of sums over items. So one resampling serves all
of them: a bootstrap draws how often each item counts, and `value` reads the resampled sums (`measured`,
metrics/resampling.py). What needs the order of the items, such as bins of equal mass, defines `weighted` instead.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from ropewalk.base.metric import Better, Metric

if TYPE_CHECKING:
    from ..question_task import Item

Floats = npt.NDArray[np.float64]


class ItemMetric(abc.ABC):
    """Turns the items of a task into one number. Shapes: K statistics."""

    name: str
    """Its name in results, such as `exact_match`."""
    unit: str = ""
    """`share` for proportions, which are shown in percent."""
    better: Better = "higher"
    of: str = "item"
    """What its `n` counts, in the singular."""
    note: str = ""
    """What the value means, in a few words. A metric with a note is a key figure of the report."""
    signature: str = ""
    """How it is computed: variant, tokenizer, version."""
    unconditional: bool = False
    """Whether it needs the likelihoods of the choices after an empty context too; they follow those of the choices."""

    def for_items(self, items: Sequence[Item]) -> Self:
        """The metric as it counts these items together, such as with the tokenizer of their language."""
        return self

    @abc.abstractmethod
    def statistics(self, item: Item) -> Sequence[float] | None:
        """The item's K statistics, as many for every item; None if the item does not count."""

    def value(self, sums_K: Floats) -> Floats:
        """The metric of summed statistics; leading axes are other sums. Here the ratio of the first two."""
        return sums_K[..., 0] / sums_K[..., 1]

    def weighted(self, table_IK: Floats, counts_RI: npt.NDArray[Any]) -> Floats:
        """The metric of R samples, in each of which the items count so many times. Here the value of weighted sums."""
        return self.value(counts_RI @ table_IK)

    def measure(self, items: Sequence[Item], *, seed: int) -> list[Metric] | None:
        """Metrics that this one makes itself, such as one for each bin; None for `weighted` with an interval."""
        return None

    def noise(self, table_IK: Floats, *, seed: int) -> Floats | None:
        """Values that chance alone gives to a metric which noise raises, such as a calibration error or a gap: its
        interval takes them into account (`ends`, metrics/resampling.py). None if noise does not raise it."""
        return None

    def score(self, item: Item) -> float | None:
        """The metric of this item alone, for paired tests and lists of the worst items; None if it is undefined."""
        statistics = self.statistics(item)
        if statistics is None:
            return None
        with np.errstate(all="ignore"):
            value = float(self.weighted(np.array([statistics], np.float64), np.ones((1, 1)))[0])
        return value if math.isfinite(value) else None
