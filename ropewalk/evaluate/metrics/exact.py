"""Exact match of completions with references."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropewalk.base.errors import UserError
from ropewalk.base.metric import SHARE

from .choices import gold_of
from .item_metric import ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item


class ExactMatch(ItemMetric):
    """Whether the first completion equals one of the references. Of choices: whether greedy decoding gives a right one.

    Settings as in lm-evaluation-harness, applied to both sides in this order; `strip` is ours.
    """

    name = "exact_match"
    unit = SHARE

    def __init__(
        self,
        *,
        regexes_to_ignore: Sequence[str] | None = None,
        ignore_case: bool = False,
        ignore_punctuation: bool = False,
        ignore_numbers: bool = False,
        strip: bool = False,
    ) -> None:
        try:
            self.regexes = [re.compile(pattern) for pattern in regexes_to_ignore or ()]
        except re.error as error:
            raise UserError(f"metric `exact_match`: regexes_to_ignore: {error.pattern!r}: {error}") from None
        self.ignore_case = ignore_case
        self.strip = strip
        removed = string.punctuation * ignore_punctuation + string.digits * ignore_numbers
        self.removed = str.maketrans("", "", removed)
        switches = {
            "case": ignore_case,
            "punctuation": ignore_punctuation,
            "numbers": ignore_numbers,
            "space": strip,
        }
        ignored = [name for name, on in switches.items() if on]
        ignored += [f"/{pattern.pattern}/" for pattern in self.regexes]
        self.signature = f"ignores:{','.join(ignored) or 'nothing'}"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        if not item.predictions and item.likelihoods:
            gold = gold_of(item)
            return (float(any(item.likelihoods[each].greedy for each in gold)), 1.0) if gold else None
        if not item.predictions:
            raise UserError(f"metric `{self.name}`: question {item.question.key} has no completion to compare")
        if not item.question.references:
            return None
        found = self.normalised(item.predictions[0])
        return float(any(found == self.normalised(reference) for reference in item.question.references)), 1.0

    def normalised(self, text: str) -> str:
        """The text without what is ignored."""
        for pattern in self.regexes:
            text = pattern.sub("", text)
        text = text.lower() if self.ignore_case else text
        text = text.translate(self.removed)
        return text.strip() if self.strip else text
