"""Exact match of completions with references."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ropewalk.base.metric import SHARE

from .item_metric import ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item


class ExactMatch(ItemMetric):
    """Whether the first completion equals one of the references, without surrounding white space."""

    name = "exact_match"
    unit = SHARE
    signature = "strip"

    def statistics(self, item: Item) -> tuple[float, float]:
        found = item.predictions[0].strip()
        return float(any(found == reference.strip() for reference in item.question.references)), 1.0
