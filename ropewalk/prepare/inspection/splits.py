"""How a large file of text is best cut into documents: tried on its beginning with each way that `split` has."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import Source
from ..readers.split import is_line, pieces

Split = Literal["none", "blank-lines", "separator", "headings", "size"]

LARGE_BYTES = 1_000_000
"""A file of text above this is cut."""
FEWEST_DOCUMENTS = 20
"""A source of fewer is cut as well: too few to hold some of them out."""
_FEWEST_PIECES = 5
"""Of a sample; fewer are no pattern."""
_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "<|end|>", "</s>", "<eos>", "<EOS>", "[EOS]", "[SEP]", "</doc>")
"""Separators that corpora in use have."""
_LONGEST_RULE = 80
_SHORT_LINE, _SHORT_LINES = 55, 2.0
"""Verse, plays and interviews have lines of up to so many characters, several in a block; prose that is wrapped has 60
to 80, prose that is not a line a paragraph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A way to cut a text, and what comes of it."""

    split: Split
    separator: str
    documents: int
    """In the sample."""
    median_characters: float
    reason: str
    """Why this way fits."""


def best_cut(texts: Sequence[str], *, prose: bool = True) -> Cut:
    """How to cut texts such as these samples; `prose` is False for code, whose empty lines end no document."""
    return (
        _at_tokens(texts)
        or _at_headings(texts)
        or _at_rules(texts)
        or (_at_blank_lines(texts) if prose else None)
        or _tried(texts, "size", "no separators and no headings were found")
    )


def _at_tokens(texts: Sequence[str]) -> Cut | None:
    counts = {token: sum(text.count(token) for text in texts) for token in _TOKENS}
    token = max(counts, key=lambda each: counts[each])
    if counts[token] < 2:
        return None
    return _tried(texts, "separator", f"`{token}` stands between its documents", separator=token)


def _at_headings(texts: Sequence[str]) -> Cut | None:
    cut = _tried(texts, "headings", "it has headings of Markdown")
    return cut if _is_sensible(cut, least=200, most=100_000) else None


def _at_rules(texts: Sequence[str]) -> Cut | None:
    """At the line of punctuation that occurs most often."""
    lines = (line.strip() for text in texts for line in text.splitlines())
    rules = Counter(line for line in lines if 0 < len(line) <= _LONGEST_RULE and is_line(line) and len(set(line)) < 4)
    if not rules:
        return None
    rule, count = rules.most_common(1)[0]
    if count < _FEWEST_PIECES:
        return None
    cut = _tried(texts, "separator", f"lines of `{rule}` stand between its parts", separator=rule)
    return cut if _is_sensible(cut, least=100, most=100_000) else None


def _at_blank_lines(texts: Sequence[str]) -> Cut | None:
    """Where blocks are complete by themselves: a speech of a play, a poem, an answer of an interview."""
    cut = _tried(texts, "blank-lines", "its blocks of short lines look like speeches, poems or entries")
    lines = [len(line) for text in texts for line in text.splitlines() if line.strip()]
    if not _is_sensible(cut, least=40, most=20_000):
        return None
    short = statistics.median(lines) <= _SHORT_LINE and len(lines) >= _SHORT_LINES * cut.documents
    return cut if short else None


def _is_sensible(cut: Cut, *, least: int, most: int) -> bool:
    return cut.documents >= _FEWEST_PIECES and least <= cut.median_characters <= most


def _tried(texts: Sequence[str], split: Split, reason: str, *, separator: str = "") -> Cut:
    settings = Source(name="sample", paths=("sample",), split=split, separator=separator or "-")
    sizes = [
        len(piece.data.decode("utf-8", "replace").strip())
        for text in texts
        for piece in pieces([text.encode("utf-8", "surrogatepass")], settings, limit=settings.limits.document_bytes)
        if not piece.data.isspace()
    ]
    median = statistics.median(sizes) if sizes else 0.0
    return Cut(split=split, separator=separator, documents=len(sizes), median_characters=median, reason=reason)
