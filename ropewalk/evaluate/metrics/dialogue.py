"""Metrics of replies: distinct n-grams, repetition, and the right response among candidates."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropewalk.base.metric import SHARE, Better, Metric

from .item_metric import ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item

_Z = 1.959963984540054
_TOKEN = re.compile(r"[\u3400-\u9fff]|[^\W_\u3400-\u9fff]+(?:['’][^\W_]+)?")


def distinct(items: Sequence[Item], n: int) -> list[Metric]:
    """Distinct n-grams of all replies, divided by their number (Li et al. 2016); empty without n-grams.

    The interval is a jackknife over items: a bootstrap draws replies twice, which are then not distinct.
    """
    replies = [[gram for text in item.predictions for gram in _ngrams(text, n)] for item in items]
    replies = [grams for grams in replies if grams]
    if not replies:
        return []
    total, users = sum(map(len, replies)), Counter(gram for grams in replies for gram in {*grams})
    interval = None
    if len(replies) > 1:
        own = [sum(users[gram] == 1 for gram in {*grams}) for grams in replies]
        left = [(len(users) - lost) / (total - len(grams)) for lost, grams in zip(own, replies, strict=True)]
        mean = sum(left) / len(left)
        error = math.sqrt((len(left) - 1) / len(left) * sum((each - mean) ** 2 for each in left))
        value = len(users) / total
        interval = (max(0.0, value - _Z * error), min(1.0, value + _Z * error))
    note = "distinct words of all replies" if n == 1 else ""
    described = {"unit": SHARE, "of": "reply", "note": note, "signature": f"n:{n}|over:all replies|interval:jackknife"}
    return [Metric(f"distinct_{n}", len(users) / total, interval, n=len(replies), **described)]  # type: ignore[arg-type]


class Repetition(ItemMetric):
    """The share of the 4-grams of a completion that it has had before (seq-rep-4, Welleck et al. 2020)."""

    name, unit = "repetition", SHARE
    better: Better = "lower"
    of = "reply"
    note = "4-grams that were there before"
    signature = "n:4|tok:words and Chinese characters"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        grams = [_ngrams(text, 4) for text in item.predictions]
        total = sum(map(len, grams))
        return (float(total - sum(len({*each}) for each in grams)), float(total)) if total else None


class RecallAt(ItemMetric):
    """Whether the right response is among the k most likely of the candidates; ties count against it."""

    unit = SHARE
    of = "context"
    note = ""
    signature = "log-likelihood of responses"

    def __init__(self, k: int = 1) -> None:
        self.name, self.k = f"recall_at_{k}", k

    def statistics(self, item: Item) -> tuple[float, float] | None:
        rank = rank_of_gold(item)
        return None if rank is None else (float(rank <= self.k), 1.0)


class ReciprocalRank(ItemMetric):
    """The mean of 1 / rank of the right response."""

    name = "mean_reciprocal_rank"
    of = "context"
    signature = "log-likelihood of responses"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        rank = rank_of_gold(item)
        return None if rank is None else (1 / rank, 1.0)


def rank_of_gold(item: Item) -> int | None:
    """The rank of the best right choice, from 1; None without one."""
    likely, gold = [answer.log_probability for answer in item.likelihoods], item.question.gold
    if not gold:
        return None
    best = max(likely[index] for index in gold)
    return 1 + sum(each >= best for index, each in enumerate(likely) if index not in gold)


def _ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    words = _TOKEN.findall(text.lower())
    return list(zip(*(words[first:] for first in range(n)), strict=False))
