"""pass@k: the chance that at least one of k completions is right, and shares of programs without a verdict.

Of n completions of a question, c are right. A draw of k without replacement has none of them with probability
C(n-c, k) / C(n, k), so 1 minus that is the unbiased estimate (Chen et al. 2021, equation 1); the plug-in
1 - (1 - c/n)^k is too low.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ropewalk.base.errors import UserError
from ropewalk.base.metric import SHARE, Better

from .item_metric import ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate from `c` right completions of `n`, correctly rounded: the binomials are whole numbers."""
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws


class PassAtK(ItemMetric):
    """The mean of `pass_at_k` over questions. A completion is right by its verdict, in tasks without verdicts if it
    equals a reference.

    A completion whose sandbox failed is left out, and so is a question with fewer than k others.
    """

    unit = SHARE
    of = "problem"

    def __init__(self, k: int = 1) -> None:
        if k < 1:
            raise UserError(f"pass@k needs k of at least 1, not {k}")
        self.k = k
        self.name = f"pass@{k}"
        self.signature = f"k:{k}|estimator:unbiased"
        self.note = f"right within {k} tries" if k > 1 else "right at the first try"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        right = correct_completions(item)
        if len(right) < self.k:
            return None
        return pass_at_k(len(right), sum(right), self.k), 1.0


def pass_at_1() -> PassAtK:
    """pass@1"""
    return PassAtK(1)


def pass_at_10() -> PassAtK:
    """pass@10"""
    return PassAtK(10)


def correct_completions(item: Item) -> list[bool]:
    """Whether each completion is right, without those that could not be judged."""
    if item.verdicts:
        return [verdict == "pass" for verdict in item.verdicts if verdict != "fault"]
    references = {reference.strip() for reference in item.question.references}
    return [prediction.strip() in references for prediction in item.predictions]


class VerdictShare(ItemMetric):
    """The share of programs with one verdict, such as `timeout`."""

    unit = SHARE
    of = "problem"
    better: Better = "lower"

    def __init__(self, kind: str, name: str) -> None:
        self._kind, self.name = kind, name
        self.signature = f"verdict:{kind}"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        total = len(item.verdicts)
        return (item.verdicts.count(self._kind) / total, 1.0) if total else None
