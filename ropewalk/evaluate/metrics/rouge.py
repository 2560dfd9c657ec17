"""ROUGE-1, -2, -3, -L and -Lsum (Lin 2004) through rouge-score, which equals ROUGE-1.5.5, with words of any script.

rouge-score's own tokenizer keeps a-z and 0-9 alone, so that identical Chinese texts score 0. Ours takes Chinese
characters as words and gives the same words on English text; `tokenizer="english"` is rouge-score's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from ropewalk.base.errors import MissingPackage, UserError

from .item_metric import ItemMetric
from .word_tokens import words

if TYPE_CHECKING:
    from ..question_task import Item

PARTS = {"f1": "fmeasure", "precision": "precision", "recall": "recall"}
LEAST_STEMMED = 4
"""Characters of the shortest word that ROUGE-1.5.5 stems."""


class Rouge(ItemMetric):
    """The mean over items; of several references, the one with the best F1."""

    kind: str
    """In rouge-score's words: rouge1 ... rouge9, rougeL, rougeLsum."""

    def __init__(
        self,
        *,
        part: Literal["f1", "precision", "recall"] = "f1",
        stemmer: bool = False,
        tokenizer: Literal["unicode", "english"] = "unicode",
        sentences: Literal["lines", "punctuation"] = "lines",
    ) -> None:
        """`stemmer` is Porter's for English. rougeLsum compares sentences: lines, or what ends with a full stop,
        question or exclamation mark."""
        for option, value, known in (
            ("part", part, tuple(PARTS)),
            ("tokenizer", tokenizer, ("unicode", "english")),
            ("sentences", sentences, ("lines", "punctuation")),
        ):
            if value not in known:
                raise UserError(f'{self.kind}: no {option} "{value}"; known: {", ".join(known)}')
        self.name = self.kind if part == "f1" else f"{self.kind}_{part}"
        self._part, self._split = PARTS[part], sentences == "punctuation"
        self._scorer = _scorer(self.kind, stemmer, tokenizer)
        split = f"|sentences:{sentences}" if self.kind == "rougeLsum" else ""
        self.signature = (
            f"{self.kind}|{part}|tok:{tokenizer}|stem:{'porter' if stemmer else 'no'}{split}|refs:best f1|mean of items"
            f"|rouge-score:{version('rouge-score')}"
        )

    def statistics(self, item: Item) -> tuple[float, float]:
        if not item.question.references:
            raise UserError(f"{self.name}: a question has no reference ({item.question.prompt[:60]!r})")
        texts = [*item.question.references, item.predictions[0]]
        *references, prediction = [_sentence_per_line(text) for text in texts] if self._split else texts
        found = self._scorer.score_multi(references, prediction)[self.kind]
        return float(getattr(found, self._part)), 1.0


class Rouge1(Rouge):
    """Unigrams."""

    kind = "rouge1"


class Rouge2(Rouge):
    """Bigrams."""

    kind = "rouge2"


class Rouge3(Rouge):
    """Trigrams."""

    kind = "rouge3"


class RougeL(Rouge):
    """The longest common subsequence of the whole texts."""

    kind = "rougeL"


class RougeLsum(Rouge):
    """The union of longest common subsequences of sentences."""

    kind = "rougeLsum"


class UnicodeTokenizer:
    """Words of any script, for rouge-score."""

    def __init__(self, stem: Callable[[str], str] | None = None) -> None:
        self._stem = stem

    def tokenize(self, text: str) -> list[str]:
        """The words of `text`, stemmed if asked for."""
        found = words(text)
        if self._stem is None:
            return found
        return [self._stem(word) if len(word) >= LEAST_STEMMED and word.isascii() else word for word in found]


def porter_stem() -> Callable[[str], str]:
    """Porter's stemmer with NLTK's extensions, which ROUGE and METEOR use; it keeps what it has stemmed."""
    try:
        from nltk.stem.porter import PorterStemmer
    except ImportError:
        raise MissingPackage("nltk", "stemming", "evaluate") from None
    return functools.lru_cache(1 << 16)(PorterStemmer().stem)


def _scorer(kind: str, stemmer: bool, tokenizer: str) -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise MissingPackage("rouge-score", "ROUGE", "evaluate") from None
    unicode = UnicodeTokenizer(porter_stem() if stemmer else None) if tokenizer == "unicode" else None
    return RougeScorer([kind], use_stemmer=stemmer, tokenizer=unicode)


def _sentence_per_line(text: str) -> str:
    return re.sub(r"(?<=[.!?])\s+|(?<=[。！？])", "\n", text)
