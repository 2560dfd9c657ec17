"""Perplexities and bits per byte, as lm-evaluation-harness defines them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from ropewalk.base.errors import UserError

from .item_metric import Floats, ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item


class Perplexity(ItemMetric):
    """Exp of the mean negative log-likelihood of the items' texts, each counted once, whatever its length: of the only
    continuation, of a right choice, or of the whole text."""

    name = "perplexity"
    better = "lower"
    signature = "per item"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        return -_log_probability(self.name, item), 1.0

    def value(self, sums_K: Floats) -> Floats:
        return np.exp(super().value(sums_K))


class _Rolling(ItemMetric):
    """A metric of whole texts. Statistics: nats, units of text."""

    better = "lower"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        question = item.question
        size = self.size(question.preamble + question.prompt)
        return (-_log_probability(self.name, item), float(size)) if size else None

    def size(self, text: str) -> int:
        """What the log-likelihood is divided by. Here the bytes of UTF-8."""
        return len(text.encode())


class WordPerplexity(_Rolling):
    """Perplexity per word; words are what white space separates. Texts in Chinese have few: use `bits_per_byte`."""

    name = "word_perplexity"
    signature = r"words:\s+"

    def size(self, text: str) -> int:
        return len(re.split(r"\s+", text))

    def value(self, sums_K: Floats) -> Floats:
        return np.exp(super().value(sums_K))


class BytePerplexity(_Rolling):
    """Perplexity per byte of UTF-8."""

    name = "byte_perplexity"
    signature = "utf-8"

    def value(self, sums_K: Floats) -> Floats:
        return np.exp(super().value(sums_K))


class BitsPerByte(_Rolling):
    """Bits per byte of UTF-8."""

    name = "bits_per_byte"
    unit = "bits"
    signature = "utf-8"

    def value(self, sums_K: Floats) -> Floats:
        return super().value(sums_K) / math.log(2)


def _log_probability(metric: str, item: Item) -> float:
    """That of the only text of the item, or of its first right choice."""
    place = item.question.gold[0] if len(item.question.choices) > 1 and item.question.gold else 0
    if place >= len(item.likelihoods) or (len(item.question.choices) > 1 and not item.question.gold):
        raise UserError(
            f"metric `{metric}`: question {item.question.key} has no likelihood of its text; use it in tasks that ask "
            "`loglikelihood` or `loglikelihood_rolling`"
        )
    return item.likelihoods[place].log_probability
