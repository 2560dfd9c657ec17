"""Rules are comparisons on columns: which document breaks which, by what value, against what threshold.

A rule is named as its setting in `prepare.filter` (`gopher.min_words`), so that a row of the ledger says what to
change. A document at the threshold stays. All rules are asked of all documents; the first that a document breaks, in
the order of `rules`, is the one that removes it, and the others tell how rules overlap and what a change would bring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .columns import Mask
from .config import Filter

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One comparison: `column`, or its share of `over`, is at least or at most `threshold`, or is one of `names`."""

    name: str
    column: str
    over: str = ""
    side: Literal["least", "most"]
    threshold: float
    spaced: bool = False
    """Whether it is asked only where most words belong to scripts that put spaces between them."""
    names: tuple[str, ...] = ()
    """What a column of text may hold: 1 is compared where it does, 0 where not, and no ledger shows these."""

    def values(self, measured: pa.RecordBatch) -> Values:
        """What is compared, a document each: 0 where there is nothing to take a share of, NaN where it is not asked."""
        if self.names:
            return np.isin(measured[self.column].to_numpy(zero_copy_only=False).astype(str), self.names).astype(float)
        values = _numbers(measured, self.column)
        if self.over:
            whole = _numbers(measured, self.over)
            values = np.divide(values, whole, out=np.zeros(len(whole)), where=whole > 0)
        if self.spaced:
            unspaced = 2 * _numbers(measured, "unsegmented_words") > _numbers(measured, "words")
            values = np.where(unspaced, np.nan, values)
        return values

    def breaks(self, values: Values) -> Mask:
        """Which documents go; NaN never does."""
        beyond: Any = values < self.threshold if self.side == "least" else values > self.threshold
        return np.asarray(beyond, bool)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What every rule says of every document."""

    rules: tuple[Rule, ...]
    values: Values
    """One row a rule, one column a document."""
    broken: Mask
    """Which of them break the rule."""

    @property
    def kept(self) -> Mask:
        """The documents that break no rule."""
        return np.asarray(~self.broken.any(axis=0), bool)

    @property
    def first(self) -> npt.NDArray[np.int64]:
        """The place in `rules` of the first that each document breaks, -1 for those that stay."""
        place = self.broken.argmax(axis=0) if self.rules else np.zeros(self.broken.shape[1], np.int64)
        return np.where(self.kept, -1, place)

    def removals(self) -> pa.RecordBatch:
        """One row a document: rule, value and threshold of what removes it, null for those that stay.

        Value and threshold are also null where a name was compared.
        """
        first = self.first
        no_number = np.array([*(bool(rule.names) for rule in self.rules), True])[first]
        # One more entry, the last, is what -1 points at.
        names = np.array([*(rule.name for rule in self.rules), None], object)
        thresholds = np.array([*(rule.threshold for rule in self.rules), np.nan])
        values = np.concatenate([self.values, np.full((1, len(first)), np.nan)])[first, np.arange(len(first))]
        columns = [
            pa.array(names[first], pa.string()),
            pa.array(values, mask=no_number),
            pa.array(thresholds[first], mask=no_number),
        ]
        return pa.record_batch(columns, names=["rule", "value", "threshold"])


def judge(measured: pa.RecordBatch, settings: Filter) -> Verdicts:
    """What the rules of `settings` say of documents with these columns.

    The columns are those of `statistics.measure`, and where the settings ask for them those of `lines.correct`,
    `language.identify` and `lists`.
    """
    asked = rules(settings)
    values = np.zeros((len(asked), measured.num_rows))
    broken = np.zeros(values.shape, bool)
    for place, rule in enumerate(asked):
        values[place] = rule.values(measured)
        broken[place] = rule.breaks(values[place])
    return Verdicts(asked, values, broken)


def rules(settings: Filter) -> tuple[Rule, ...]:
    """The rules that are switched on, in the order in which they are asked."""
    return (
        *_listed(settings, ""),
        *_url_rules(settings),
        *_language_rules(settings),
        *_listed(settings, "gopher"),
        *_listed(settings, "repetition"),
        *_c4_rules(settings),
        *_listed(settings, "fineweb"),
        *_listed(settings, "refinedweb"),
        *_word_rules(settings),
    )


# Setting -> the column it bounds, and what that is a share of.
_BOUNDED = {
    "": {
        "min_characters": ("characters", ""),
        "max_characters": ("characters", ""),
        "max_mean_line_length": ("line_characters", "all_lines"),
        "min_letter_share": ("letters", "visible_characters"),
        "max_duplicate_line_share": ("duplicate_lines", "lines"),
    },
    "gopher": {
        "min_words": ("words", ""),
        "max_words": ("words", ""),
        "min_mean_word_length": ("word_characters", "words"),
        "max_mean_word_length": ("word_characters", "words"),
        "max_hash_ratio": ("hash_signs", "pieces"),
        "max_ellipsis_ratio": ("ellipses", "pieces"),
        "max_bullet_line_share": ("bullet_lines", "lines"),
        "max_ellipsis_line_share": ("ellipsis_lines", "lines"),
        "min_alphabetic_share": ("alphabetic_words", "pieces"),
        "min_stop_words": ("stop_words", ""),
    },
    "repetition": {
        "max_duplicate_paragraph_share": ("duplicate_paragraphs", "paragraphs"),
        "max_duplicate_paragraph_character_share": ("duplicate_paragraph_characters", "characters"),
        "max_duplicate_line_share": ("duplicate_lines", "lines"),
        "max_duplicate_line_character_share": ("duplicate_line_characters", "characters"),
        **{f"max_top_{n}_gram_share": (f"top_{n}_gram_characters", "characters") for n in (2, 3, 4)},
        **{f"max_duplicate_{n}_gram_share": (f"duplicate_{n}_gram_characters", "characters") for n in range(5, 11)},
    },
    "fineweb": {
        "min_terminal_line_share": ("terminal_lines", "lines"),
        "max_short_line_share": ("short_lines", "lines"),
        "max_duplicate_character_share": ("duplicate_line_characters", "line_characters"),
        "max_line_ends_per_word": ("line_ends", "pieces"),
    },
    "refinedweb": {"max_flagged_word_share": ("flagged_words", "original_words")},
}
_SPACED = {"min_mean_word_length", "max_mean_word_length", "min_stop_words"}


def _listed(settings: Filter, table: str) -> Iterator[Rule]:
    """The rules of `_BOUNDED`; one whose threshold no document can break is left out."""
    section = getattr(settings, table) if table else settings
    if section is None:
        return
    for field, (column, over) in _BOUNDED[table].items():
        threshold = float(getattr(section, field))
        side: Literal["least", "most"] = "least" if field.startswith("min_") else "most"
        off = 1.0 if side == "most" and field.endswith(("_share", "_ratio")) else 0.0
        if threshold != off:
            yield Rule(
                name=f"{table}.{field}".lstrip("."),
                column=column,
                over=over,
                side=side,
                threshold=threshold,
                spaced=field in _SPACED,
            )


def _c4_rules(settings: Filter) -> Iterator[Rule]:
    c4 = settings.c4
    if c4 is None:
        return
    if c4.lorem_ipsum:
        yield Rule(name="c4.lorem_ipsum", column="lorem_ipsum_lines", side="most", threshold=0)
    if c4.curly_brackets:
        yield Rule(name="c4.curly_brackets", column="curly_brackets", side="most", threshold=0)
    if c4.min_sentences:
        yield Rule(name="c4.min_sentences", column="sentences", side="least", threshold=c4.min_sentences)
    if c4.min_long_lines:
        yield Rule(name="c4.min_long_lines", column="long_lines", side="least", threshold=c4.min_long_lines)


def _language_rules(settings: Filter) -> Iterator[Rule]:
    language = settings.language
    if language and language.keep:
        yield Rule(name="language.keep", column="language", side="least", threshold=1, names=language.keep)
    if language and language.min_confidence:
        yield Rule(
            name="language.min_confidence",
            column="language_confidence",
            side="least",
            threshold=language.min_confidence,
        )


def _url_rules(settings: Filter) -> Iterator[Rule]:
    urls = settings.urls
    if urls is None:
        return
    for field, limit in (("domains", 0), ("words", 0), ("soft_words", urls.max_soft_words), ("parts", 0)):
        if getattr(urls, field):
            name = "urls.max_soft_words" if field == "soft_words" else f"urls.{field}"
            yield Rule(name=name, column=f"url_{field}", side="most", threshold=limit)


def _word_rules(settings: Filter) -> Iterator[Rule]:
    words = settings.words
    if words:
        yield Rule(name="words.max_words", column="listed_phrases", side="most", threshold=words.max_words)
        if words.max_share < 1:
            yield Rule(
                name="words.max_share", column="listed_words", over="words", side="most", threshold=words.max_share
            )


def _numbers(measured: pa.RecordBatch, column: str) -> Values:
    values: Values = measured[column].to_numpy(zero_copy_only=False).astype(np.float64)
    return values
