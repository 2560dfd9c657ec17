"""Item metrics: the value of sums, intervals, groups."""

from __future__ import annotations

import numpy as np
import pytest

from ropewalk.base.metric import SHARE
from ropewalk.evaluate.intervals import proportion
from ropewalk.evaluate.metrics.exact import ExactMatch
from ropewalk.evaluate.metrics.item_metric import ItemMetric
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question


def item(prediction: str, reference: str, group: str = "") -> Item:
    return Item(question=Question(prompt="?", references=(reference,), group=group), predictions=(prediction,))


class Length(ItemMetric):
    name, unit = "length", "characters"

    def statistics(self, item: Item) -> tuple[float, float]:
        return len(item.predictions[0]), 1


def test_a_share_has_its_wilson_interval_and_its_groups() -> None:
    items = [item("a", "a", "x"), item("b ", "b", "x"), item("c", "d", "y")]
    whole, *groups = measured(ExactMatch(strip=True), items)
    wilson = proportion("exact_match", 2, 3)
    assert (whole.value, whole.interval, whole.n, whole.unit) == (2 / 3, wilson.interval, 3, SHARE)
    assert [(each.group, each.value) for each in groups] == [("x", 1.0), ("y", 0.0)]


def test_a_bootstrap_interval_is_that_of_resampled_items() -> None:
    lengths = [1, 5, 9, 2, 2, 7]
    (found,) = measured(Length(), [item("x" * length, "") for length in lengths], seed=3)
    drawn = np.random.default_rng(3).integers(6, size=(1000, 6))
    means = np.array(lengths)[drawn].mean(1)
    assert found.value == pytest.approx(np.mean(lengths))
    assert found.interval == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))


def test_items_that_do_not_count_are_left_out() -> None:
    class Odd(Length):
        def statistics(self, item: Item) -> tuple[float, float] | None:
            return super().statistics(item) if len(item.predictions[0]) % 2 else None

    (found,) = measured(Odd(), [item("abc", ""), item("ab", "")])
    assert (found.value, found.n, found.interval) == (3, 1, None)
    assert measured(Odd(), [item("ab", "")]) == []
