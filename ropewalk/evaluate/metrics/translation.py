"""BLEU, chrF, chrF++ and TER: sacrebleu counts and signs, the value of summed counts is computed here.

sacrebleu's corpus scores are functions of sums over sentences. Computed for thousands of sums at once, they give
bootstrap intervals and significance tests in seconds. Values run from 0 to 100, as in sacrebleu.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ropewalk.base.errors import MissingPackage, UserError

from .item_metric import Floats, ItemMetric
from .word_tokens import language_of

if TYPE_CHECKING:
    from ..question_task import Item

TOKENIZERS = {"zh": "zh", "ja": "char"}
"""sacrebleu's tokenizer for BLEU by language of the references; 13a for others. Japanese with MeCab: `ja-mecab`."""


class SacreMetric(ItemMetric):
    """A metric that sacrebleu counts."""

    of = "segment"

    def __init__(self) -> None:
        self._references: int | None = None
        self._sacre = self._make("")

    @abc.abstractmethod
    def _make(self, language: str) -> Any:
        """The sacrebleu metric for references in `language`."""

    @property
    def signature(self) -> str:  # type: ignore[override]
        """sacrebleu's own, with the number of references once the items are known."""
        self._sacre.num_refs = -1 if self._references is None else self._references
        return str(self._sacre.get_signature().format())

    def for_items(self, items: Sequence[Item]) -> Self:
        references = [item.question.references for item in items]
        numbers = {len(each) for each in references}
        found = copy.copy(self)
        found._sacre = self._make(language_of(text for each in references for text in each))
        found._references = numbers.pop() if len(numbers) == 1 else None
        return found

    def statistics(self, item: Item) -> list[float]:
        if not item.question.references:
            raise UserError(f"{self.name}: a question has no reference ({item.question.prompt[:60]!r})")
        # The route of sacrebleu's own significance tests; its public scores leave out the counts of chrF.
        columns = [[reference] for reference in item.question.references]
        (found,) = self._sacre._extract_corpus_statistics([item.predictions[0]], columns)
        return [float(each) for each in found]


class Bleu(SacreMetric):
    """BLEU (Papineni et al. 2002). `score` of one segment uses the effective order, as sacrebleu advises."""

    name = "bleu"

    def __init__(
        self,
        *,
        tokenize: str = "",
        lowercase: bool = False,
        smooth_method: str = "exp",
        smooth_value: float | None = None,
        max_ngram_order: int = 4,
        effective_order: bool = False,
    ) -> None:
        """`tokenize` is sacrebleu's: none, 13a, intl, char, zh and others; by default that of the references' language,
        which the signature names. `smooth_method` is exp, floor, add-k or none."""
        self._tokenize, self._lowercase = tokenize, lowercase
        self._method, self._order, self._effective = smooth_method, max_ngram_order, effective_order
        bleu = _sacrebleu().BLEU
        _among("smooth_method", smooth_method, bleu.SMOOTH_DEFAULTS)
        _among("tokenize", tokenize or "13a", bleu.TOKENIZERS)
        _check_model(tokenize)
        self._given_value = smooth_value
        self._value = bleu.SMOOTH_DEFAULTS[smooth_method] if smooth_value is None else smooth_value
        super().__init__()

    def _make(self, language: str) -> Any:
        tokenize = self._tokenize or TOKENIZERS.get(language, "13a")
        try:
            return _sacrebleu().BLEU(
                tokenize=tokenize,
                lowercase=self._lowercase,
                smooth_method=self._method,
                smooth_value=self._given_value,
                max_ngram_order=self._order,
                effective_order=self._effective,
                force=True,
            )
        except (ImportError, RuntimeError) as error:  # the libraries of some tokenizers
            raise UserError(f'bleu: the tokenizer "{tokenize}": {" ".join(str(error).split())}') from error

    def value(self, sums_K: Floats) -> Floats:
        return self._of(sums_K, effective=self._effective)

    def score(self, item: Item) -> float:
        return float(self._of(np.asarray(self.statistics(item)), effective=True))

    def _of(self, sums_K: Floats, *, effective: bool) -> Floats:
        length, reference_length = sums_K[..., 0], sums_K[..., 1]
        correct, total = sums_K[..., 2 : 2 + self._order].copy(), sums_K[..., 2 + self._order :].copy()
        none = ~correct.any(-1)
        if self._method == "add-k":
            correct[..., 1:] += self._value
            total[..., 1:] += self._value
        possible = np.logical_and.accumulate(total > 0, axis=-1)
        missed = possible & (correct == 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            precision = np.where(possible, correct / total, 0)
            if self._method == "exp":
                precision = np.where(missed, 0.5 ** np.cumsum(missed, -1) / total, precision)
            elif self._method == "floor":
                precision = np.where(missed, self._value / total, precision)
            counted = possible if effective else np.ones_like(possible)
            logs = np.where(counted, np.log(precision), 0).sum(-1) / np.maximum(counted.sum(-1), 1)
            brevity = np.where(length < reference_length, np.exp(1 - reference_length / length), 1.0)
        return np.where(none | (length == 0), 0.0, 100 * brevity * np.exp(logs))


class ChrF(SacreMetric):
    """chrF (Popović 2015): F-score of character n-grams, recall weighing `beta` times as much as precision."""

    name = "chrf"

    def __init__(
        self,
        *,
        char_order: int = 6,
        word_order: int = 0,
        beta: int = 2,
        lowercase: bool = False,
        whitespace: bool = False,
        eps_smoothing: bool = False,
    ) -> None:
        """`word_order` 2 is chrF++. `eps_smoothing` is that of chrF++.py, NLTK and Moses."""
        self._options = {"char_order": char_order, "word_order": word_order, "beta": beta, "lowercase": lowercase}
        self._options |= {"whitespace": whitespace, "eps_smoothing": eps_smoothing}
        self._weight, self._epsilon = beta**2, eps_smoothing
        super().__init__()

    def _make(self, language: str) -> Any:
        return _sacrebleu().CHRF(**self._options)

    @property
    def signature(self) -> str:  # type: ignore[override]
        beta = self._options["beta"]
        return super().signature if beta == 2 else f"{super().signature}|beta:{beta}"

    def value(self, sums_K: Floats) -> Floats:
        counts = sums_K.reshape(*sums_K.shape[:-1], -1, 3)
        found, wanted, matched = counts[..., 0], counts[..., 1], counts[..., 2]
        tiny = 1e-16
        precision = np.where(found > 0, matched / np.maximum(found, 1), tiny)
        recall = np.where(wanted > 0, matched / np.maximum(wanted, 1), tiny)
        if self._epsilon:
            return 100 * _f_score(precision, recall, weight=self._weight, otherwise=tiny).mean(-1)
        both = (found > 0) & (wanted > 0)
        orders = np.maximum(both.sum(-1), 1)
        means = [np.where(both, each, 0).sum(-1) / orders for each in (precision, recall)]
        return 100 * _f_score(*means, weight=self._weight, otherwise=0.0)


class ChrFPlusPlus(ChrF):
    """chrF++ (Popović 2017): chrF with word unigrams and bigrams."""

    name = "chrf++"

    def __init__(self, *, lowercase: bool = False, whitespace: bool = False, eps_smoothing: bool = False) -> None:
        super().__init__(word_order=2, lowercase=lowercase, whitespace=whitespace, eps_smoothing=eps_smoothing)


class Ter(SacreMetric):
    """Translation edit rate (Snover et al. 2006), in percent of the mean reference length."""

    name, better = "ter", "lower"

    def __init__(
        self,
        *,
        normalized: bool | None = None,
        no_punct: bool = False,
        asian_support: bool | None = None,
        case_sensitive: bool = False,
    ) -> None:
        """By default `normalized` and `asian_support` are on for Chinese and Japanese references alone, which makes
        each character a word; the signature names both."""
        self._options = {"no_punct": no_punct, "case_sensitive": case_sensitive}
        self._given = {"normalized": normalized, "asian_support": asian_support}
        super().__init__()

    def _make(self, language: str) -> Any:
        chosen = {key: language in TOKENIZERS if value is None else value for key, value in self._given.items()}
        return _sacrebleu().TER(**self._options, **chosen)

    def value(self, sums_K: Floats) -> Floats:
        edits, length = sums_K[..., 0], sums_K[..., 1]
        # Against an empty reference, any text is one whole error.
        return 100 * np.where(length > 0, edits / np.maximum(length, 1e-300), np.minimum(edits, 1))


def _f_score(precision: Floats, recall: Floats, *, weight: float, otherwise: float) -> Floats:
    below = weight * precision + recall
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below > 0, (1 + weight) * precision * recall / below, otherwise)


def _among(option: str, value: str, known: Any) -> None:
    if value not in known:
        raise UserError(f'bleu: no {option} "{value}"; known: {", ".join(known)}')


def _check_model(tokenize: str) -> None:
    """Refuses a tokenizer whose model sacrebleu would download: nothing is fetched silently."""
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    if tokenize in SPM_MODELS:
        model = Path(SACREBLEU_DIR) / "models" / Path(SPM_MODELS[tokenize]["url"]).name
        if not model.exists():
            remedy = f"download {SPM_MODELS[tokenize]['url']} as this file, or choose another tokenizer"
            raise UserError(f'bleu: the tokenizer "{tokenize}" needs {model}; {remedy}')


def _sacrebleu() -> Any:
    try:
        import sacrebleu.metrics
    except ImportError:
        raise MissingPackage("sacrebleu", "BLEU, chrF and TER", "evaluate") from None
    return sacrebleu.metrics
