"""F1 over tokens as in SQuAD (Rajpurkar et al. 2016), for Chinese too."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING

from ropewalk.base.metric import SHARE

from .item_metric import ItemMetric
from .word_tokens import HAN, KANA

if TYPE_CHECKING:
    from ..question_task import Item


class TokenF1(ItemMetric):
    """The harmonic mean of the shares of tokens that prediction and reference have in common; the best reference
    counts. Without case, punctuation and English articles; Chinese characters are tokens."""

    name = "token_f1"
    unit = SHARE
    signature = "squad|lower case, no punctuation or articles|chinese characters are tokens|refs:best"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        references = item.question.references
        if not references:
            return None
        found = answer_tokens(item.predictions[0])
        return max(_f1(found, answer_tokens(reference)) for reference in references), 1.0


def answer_tokens(text: str) -> list[str]:
    """The tokens of an answer, by the rules of SQuAD's script and for all scripts."""
    kept = "".join(each for each in text.lower() if not _is_punctuation(each))
    return _CHARACTER.sub(r" \g<0> ", _ARTICLE.sub(" ", kept)).split()


def _is_punctuation(character: str) -> bool:
    """ASCII symbols such as `$` are punctuation to SQuAD's script; other scripts' are taken by Unicode category."""
    code = ord(character)
    if code < 128:
        return 32 < code < 127 and not character.isalnum()
    return unicodedata.category(character).startswith("P")


_ARTICLE = re.compile(r"\b(a|an|the)\b")
_CHARACTER = re.compile(f"[{HAN}{KANA}]")


def _f1(found: list[str], wanted: list[str]) -> float:
    if not found or not wanted:
        return float(found == wanted)  # SQuAD 2.0: no answer is right where none is wanted
    common = (Counter(found) & Counter(wanted)).total()
    return 2 * common / (len(found) + len(wanted))
