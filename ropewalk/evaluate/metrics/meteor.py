"""METEOR in two variants, which give different numbers for the same texts.

`nltk` (Lavie and Agarwal 2007, as NLTK computes it): mean over items of each item's score; matches by stages (exact,
stem, synonym), the last free word first. `1.5` (Denkowski and Lavie 2014): parameters tuned to human rankings, content
words above function words, the best alignment over all matches, and a corpus score from summed counts. It differs from
the Java program in three points, which the signature names: no paraphrase table, our own list of function words unless
`function_words` names the program's, and a search among 2,000 partial alignments where that one keeps 40. Synonyms need
a WordNet database; without one there are none, and the signature says so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ropewalk.base.errors import DataError, MissingPackage, UserError

from .item_metric import Floats, ItemMetric
from .rouge import porter_stem
from .word_alignment import Pair, best_alignment, count_chunks, greedy_alignment
from .word_tokens import HAN, KANA
from .wordnet import WordNet, find_wordnet

if TYPE_CHECKING:
    from ..question_task import Item

Stem = Callable[[str], str]

_FREQUENT = """
, . ; : ? ! " ' - a about after all an and any are as at be been before but by came can come could d did do down for
from good had has have he her him his i if in into is it its know like little made man me more my no not now of on
one only or other our out over s said see she so some t than that the their them then there these they this time to
up upon us very was we well were what when which who will with would you your
"""
FUNCTION_WORDS = frozenset(_FREQUENT.split())
"""Words above a thousandth of the 9.7 M tokens of 120 English books in the public domain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """Denkowski and Lavie 2014, table 1."""

    alpha: float
    """Weight of recall in the mean of precision and recall."""
    beta: float
    """Exponent of the fragmentation penalty."""
    gamma: float
    """Largest fragmentation penalty."""
    delta: float
    """Weight of content words; function words have the rest."""
    weights: tuple[float, float, float]
    """Of exact, stem and synonym matches."""


ENGLISH = Parameters(alpha=0.85, beta=0.2, gamma=0.6, delta=0.75, weights=(1.0, 0.6, 0.8))
UNIVERSAL = Parameters(alpha=0.7, beta=1.4, gamma=0.3, delta=0.7, weights=(1.0, 0.0, 0.0))
"""For languages without tuned parameters; exact matches alone."""


class Meteor(ItemMetric):
    """METEOR as NLTK computes it; of several references, the best counts."""

    name = "meteor"

    def __init__(self, *, tokenize: Literal["words", "space"] = "words", wordnet: str = "") -> None:
        """`words` separates punctuation and Chinese characters, `space` splits at white space alone. `wordnet` is the
        folder of a WordNet database; by default those of Debian and NLTK are tried."""
        self._tokenize = _tokenizer(self.name, tokenize)
        self._wordnet = find_wordnet(Path(wordnet) if wordnet else None)
        self._stem = porter_stem()
        self.signature = f"nltk|tok:{tokenize}|case:lc|stem:porter|syn:{_named(self._wordnet)}|align:greedy|refs:best"

    def statistics(self, item: Item) -> tuple[float, float]:
        prediction = self._tokenize(item.predictions[0])
        return max(self._of(prediction, self._tokenize(text)) for text in _references(self.name, item)), 1.0

    def _of(self, prediction: list[str], reference: list[str]) -> float:
        pairs = greedy_alignment(prediction, reference, (_exact, self._stemmed, self._synonyms))
        if not pairs:
            return 0.0
        precision, recall = len(pairs) / len(prediction), len(pairs) / len(reference)
        mean = precision * recall / (0.9 * precision + 0.1 * recall)
        return mean * (1 - 0.5 * (count_chunks(pairs) / len(pairs)) ** 3)

    def _stemmed(self, word: str) -> tuple[str, Set[str]]:
        stem = self._stem(word)
        return stem, {stem}

    def _synonyms(self, word: str) -> tuple[str, Set[str]]:
        return word, {word, *(self._wordnet.synonyms(word) if self._wordnet else ())}


class Meteor15(ItemMetric):
    """METEOR 1.5 without paraphrases: a corpus score; of several references, the best of an item counts."""

    name = "meteor_1.5"

    def __init__(
        self,
        *,
        language: Literal["en", "other"] = "en",
        tokenize: Literal["words", "space"] = "words",
        wordnet: str = "",
        function_words: str = "",
    ) -> None:
        """`other` languages use the universal parameters and exact matches. `function_words` is a file with one word
        per line, such as `function/english.words` of the Java program; other options are those of `Meteor`."""
        if language not in ("en", "other"):
            raise UserError(f'{self.name}: no language "{language}"; known: en, other')
        self._tokenize, english = _tokenizer(self.name, tokenize), language == "en"
        self._parameters = ENGLISH if english else UNIVERSAL
        self._wordnet = find_wordnet(Path(wordnet) if wordnet else None) if english else None
        self._stem = _snowball_stem() if english else None
        listed = _listed(Path(function_words)) if function_words else FUNCTION_WORDS
        self._functions = listed if english or function_words else frozenset()
        self.signature = (
            f"1.5|{language}|tok:{tokenize}|case:lc|stem:{'snowball' if english else 'no'}|syn:{_named(self._wordnet)}"
            f"|para:no|function words:{Path(function_words).name if function_words else len(self._functions)}"
            "|align:best|refs:best"
        )

    def statistics(self, item: Item) -> list[float]:
        prediction = self._tokenize(item.predictions[0])
        rows = [self._counts(prediction, self._tokenize(text)) for text in _references(self.name, item)]
        return max(rows, key=lambda row: float(self.value(np.asarray(row))))

    def value(self, sums_K: Floats) -> Floats:
        words, matched, chunks = sums_K[..., :4], sums_K[..., 4:8], sums_K[..., 9]
        known, delta = self._parameters, self._parameters.delta
        shares = np.array([delta, 1 - delta])  # of content and function words
        matches = sums_K[..., 8]
        with np.errstate(divide="ignore", invalid="ignore"):
            precision = matched[..., :2] @ shares / (words[..., :2] @ shares)
            recall = matched[..., 2:] @ shares / (words[..., 2:] @ shares)
            mean = 1 / ((1 - known.alpha) / precision + known.alpha / recall)
            whole = (words[..., :2].sum(-1) == matches) & (words[..., 2:].sum(-1) == matches) & (chunks == 1)
            penalty = known.gamma * np.where(whole, 0, chunks / matches) ** known.beta
            found = mean * (1 - penalty)
        return np.where(np.isfinite(found), found, 0.0)

    def _counts(self, prediction: list[str], reference: list[str]) -> list[float]:
        """Words of the prediction, content and function, then of the reference; the same of matched words, weighted;
        matches; chunks."""
        pairs, kinds = self._align(prediction, reference)
        row = np.zeros(10)
        for first, words in ((0, prediction), (2, reference)):
            for word in words:
                row[first + (word in self._functions)] += 1
        for (left, right), kind in zip(pairs, kinds, strict=True):
            weight = self._parameters.weights[kind]
            row[4 + (prediction[left] in self._functions)] += weight
            row[6 + (reference[right] in self._functions)] += weight
        row[8:] = len(pairs), count_chunks(pairs)
        return [float(each) for each in row]

    def _align(self, prediction: list[str], reference: list[str]) -> tuple[list[Pair], list[int]]:
        """The best alignment, and the kind of each match: 0 exact, 1 stem, 2 synonym."""
        kinds = [
            {at: kind for at, word in enumerate(prediction) if (kind := self._kind(word, other)) is not None}
            for other in reference
        ]
        # An exact match counts as two others, as in the program's search.
        pairs = best_alignment([{at: 1 if kind else 2 for at, kind in each.items()} for each in kinds])
        return pairs, [kinds[right][left] for left, right in pairs]

    def _kind(self, word: str, other: str) -> int | None:
        if word == other:
            return 0
        if self._stem and self._stem(word) == self._stem(other):
            return 1
        if self._wordnet and not self._wordnet.senses(word).isdisjoint(self._wordnet.senses(other)):
            return 2
        return None


def _exact(word: str) -> tuple[str, Set[str]]:
    return word, {word}


def _references(name: str, item: Item) -> Sequence[str]:
    if not item.question.references:
        raise UserError(f"{name}: a question has no reference ({item.question.prompt[:60]!r})")
    return item.question.references


_TOKEN = re.compile(rf"[{HAN}{KANA}]|(?:(?![{HAN}{KANA}])\w)+|[^\w\s]")


def _tokenizer(name: str, tokenize: str) -> Callable[[str], list[str]]:
    if tokenize == "words":
        return lambda text: _TOKEN.findall(text.lower())
    if tokenize == "space":
        return lambda text: text.lower().split()
    raise UserError(f'{name}: no tokenize "{tokenize}"; known: words, space')


def _named(wordnet: WordNet | None) -> str:
    return f"wordnet-{wordnet.version}" if wordnet else "no"


def _listed(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: function words: {error}") from error


def _snowball_stem() -> Stem:
    try:
        from nltk.stem.snowball import EnglishStemmer
    except ImportError:
        raise MissingPackage("nltk", "stemming", "evaluate") from None
    return functools.lru_cache(1 << 16)(EnglishStemmer().stem)
