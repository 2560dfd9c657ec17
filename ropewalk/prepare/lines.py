"""Line-wise corrections: lines of menus, counters and notices are dropped, marks and short phrases cut out.

RefinedWeb's corrections come first, then C4's, each in one pass that describes every line as a row of numbers; which
lines go is a comparison on columns. A dropped line takes its line end with it; of two gaps that meet one is left. What
every rule took from every document is counted: the bytes before are the bytes after and those that rules took.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .columns import Bytes, Mask, Offsets, text_buffers
from .config import C4, Filter, RefinedWeb
from .kernels import units as kernels
from .kernels.numbering import Counts
from .kernels.phrases import Phrases, make_phrases
from .kernels.units import Units
from .kernels.words import characters
from .statistics import POLICY_PHRASES


@dataclass(frozen=True, slots=True)
class Corrected:
    """Corrected texts, and what every rule took from every document."""

    text: pa.LargeStringArray
    rules: tuple[str, ...]
    """Names as in `prepare.filter`: `c4.javascript`."""
    units: Counts
    """How many lines (or sentences, paragraphs, marks, phrases) each rule took: a row a rule, a column a document."""
    removed_bytes: Counts
    """The bytes of these, of the same shape."""
    columns: pa.RecordBatch
    """For `rules.judge`: `original_words`, and `flagged_words` in what RefinedWeb's rules took."""


def correct(text: pa.LargeStringArray, settings: Filter) -> Corrected:
    """`text` without what the rules of `settings.refinedweb` and `settings.c4` take out of it."""
    words = flagged = np.zeros(len(text), np.int64)
    passes: list[_Pass] = []
    if settings.refinedweb:
        passes.append(_refinedweb(text, settings.refinedweb))
        words, flagged = passes[-1].words, passes[-1].flagged_words
    if settings.c4:
        passes.append(_c4(passes[-1].text if passes else text, settings.c4))
        words = words if settings.refinedweb else passes[-1].words
    nothing = np.zeros((0, len(text)), np.int64)
    return Corrected(
        passes[-1].text if passes else text,
        tuple(rule for done in passes for rule in done.rules),
        np.concatenate([nothing, *(done.units for done in passes)]),
        np.concatenate([nothing, *(done.removed_bytes for done in passes)]),
        pa.record_batch([pa.array(words), pa.array(flagged)], names=["original_words", "flagged_words"]),
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    """What one set of rules did."""

    text: pa.LargeStringArray
    rules: tuple[str, ...]
    units: Counts
    removed_bytes: Counts
    words: Counts
    flagged_words: Counts


def _refinedweb(text: pa.LargeStringArray, settings: RefinedWeb) -> _Pass:
    data, offsets = text_buffers(text)
    units = kernels.split_lines(data, offsets, characters())
    phrases = _patterns(settings.counters, settings.starts, settings.ends, settings.anywhere)
    features, cuts = kernels.describe(data, units, characters(), phrases, settings.pattern_words, False)
    words, letters, capitals, _, _, _, counted, cut_words = features.T
    drops = {
        "max_uppercase_share": (letters > 0) & (capitals > settings.max_uppercase_share * letters),
        "numbers": (words > 0) & (letters == 0) & settings.numbers,
        "counters": counted > 0,
        "single_words": (words == 1) & settings.single_words,
        "patterns": (cut_words > 0) & (cut_words == words),
    }
    return _taken(text, units, "refinedweb", drops, cuts, "patterns", words, cut_words)


def _c4(text: pa.LargeStringArray, settings: C4) -> _Pass:
    data, offsets = text_buffers(text)
    units = kernels.split_lines(data, offsets, characters())
    if settings.unit == "sentence":
        units = kernels.split_sentences(data, units, characters())
    elif settings.unit == "paragraph":
        units = _joined(units)
    features, cuts = kernels.describe(data, units, characters(), _notices(), 0, settings.citations)
    words, _, _, longest, ended, kinds, _, _ = features.T
    drops = {
        "max_word_length": (longest > settings.max_word_length) & (settings.max_word_length > 0),
        "terminal_punctuation": (ended == 0) & settings.terminal_punctuation,
        "min_line_words": words < settings.min_line_words,
        "javascript": (kinds & kernels.JAVASCRIPT > 0) & settings.javascript,
        "policy": (kinds & kernels.POLICY > 0) & settings.policy,
    }
    return _taken(text, units, "c4", drops, cuts, "citations", words, np.zeros_like(words))


def _taken(
    text: pa.LargeStringArray,
    units: Units,
    table: str,
    drops: dict[str, Mask],
    cuts: Counts,
    cut_rule: str,
    words: Counts,
    cut_words: Counts,
) -> _Pass:
    """Texts without the units that a rule drops (the first is named) and without the `cuts` in those that stay."""
    data, offsets = text_buffers(text)
    names = list(dict.fromkeys([*drops, cut_rule]))
    rule_of = np.full(len(words), -1)
    for place, broken in reversed(list(enumerate(drops.values()))):
        rule_of[broken] = place
    dropped = rule_of >= 0
    stops = kernels.unit_spans(units, offsets, dropped)
    cuts = cuts[~dropped[cuts[:, 0]]]
    owner = np.concatenate([np.flatnonzero(dropped), cuts[:, 0]])
    starts = np.concatenate([units.starts[dropped], cuts[:, 1]])
    ends = np.concatenate([stops[dropped], cuts[:, 2]])
    taken_by = np.concatenate([rule_of[dropped], np.full(len(cuts), names.index(cut_rule))])
    order = np.argsort(starts, kind="stable")
    owner, starts, ends, taken_by = owner[order], starts[order], ends[order], taken_by[order]

    documents = len(offsets) - 1
    document_of = np.repeat(np.arange(documents), np.diff(units.bounds))
    cells = taken_by * documents + document_of[owner]
    shape = (len(names), documents)
    removed_bytes = _sums(cells, ends - starts, shape[0] * documents).reshape(shape)
    flagged = np.where(dropped, words, cut_words)
    return _Pass(
        _without(data, offsets, starts, ends, removed_bytes.sum(axis=0)) if len(cells) else text,
        tuple(f"{table}.{name}" for name in names),
        _sums(cells, np.ones(len(cells)), shape[0] * documents).reshape(shape),
        removed_bytes,
        _sums(document_of, words, documents),
        _sums(document_of, flagged, documents),
    )


def _without(data: Bytes, offsets: Offsets, starts: Offsets, stops: Offsets, removed: Counts) -> pa.LargeStringArray:
    """The texts without these spans, of which `removed` bytes lie in each document."""
    places = np.concatenate([[0], np.cumsum(np.diff(offsets) - removed)])
    out = np.empty(places[-1], np.uint8)
    kernels.copy_without(data, offsets[0], offsets[-1], starts, stops, out)
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, pa.py_buffer(places), pa.py_buffer(out))


def _joined(lines: Units) -> Units:
    """Lines with nothing but a line end between them, put together: paragraphs."""
    begins = np.ones(len(lines.starts), bool)
    begins[1:] = lines.starts[1:] > lines.ends[:-1] + 1
    begins[lines.bounds[:-1][lines.bounds[:-1] < len(begins)]] = True
    ends = np.append(begins[1:], True)[: len(begins)]
    before = np.concatenate([[0], np.cumsum(begins)])
    return Units(lines.starts[begins], lines.ends[ends], before[lines.bounds])


def _sums(cells: Counts, values: npt.NDArray[np.number], size: int) -> Counts:
    return np.bincount(cells, values, size).astype(np.int64)


@functools.cache
def _notices() -> Phrases:
    return make_phrases([("javascript", kernels.JAVASCRIPT), *((phrase, kernels.POLICY) for phrase in POLICY_PHRASES)])


@functools.lru_cache(maxsize=8)
def _patterns(counters: Sequence[str], starts: Sequence[str], ends: Sequence[str], anywhere: Sequence[str]) -> Phrases:
    kinds = (kernels.COUNTER, counters), (kernels.STARTS, starts), (kernels.ENDS, ends), (kernels.ANYWHERE, anywhere)
    return make_phrases([(phrase, bit) for bit, some in kinds for phrase in some])
