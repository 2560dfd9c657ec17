"""The line-wise corrections written the plain way, on strings; they share nothing with the kernels but definitions."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence

from ropewalk.prepare.config import C4, RefinedWeb
from tests.prepare.slow_statistics import (
    POLICY,
    holds,
    is_start,
    is_terminal,
    is_unspaced,
    lowered,
    marks_in,
    sentence_ends,
    spans,
    words_of,
)

CITATION = re.compile(r"\[[0-9]*\]|\[edit\]|\[citation needed\]")
PLACE = "\ue000"
"""Stands for a citation: no word, no space, and not seen by the rules."""


def c4(text: str, settings: C4) -> str:
    def drops(unit: str) -> bool:
        bare = CITATION.sub(PLACE, unit) if settings.citations else unit
        end = re.sub(rf"[\s{PLACE}]+$", "", bare)
        stretches = re.split(r"\s", "".join(" " if is_unspaced(c) else c for c in bare.replace(PLACE, "")))
        ended = end and (is_terminal(end[-1]) or is_quote(end[-1])) and not end.endswith("...")
        return (
            (settings.max_word_length > 0 and max(map(len, stretches)) > settings.max_word_length)
            or (settings.terminal_punctuation and not ended)
            or len(words_of(bare)) < settings.min_line_words
            or (settings.javascript and holds(bare, ("javascript",)))
            or (settings.policy and holds(bare, POLICY))
        )

    def edit(unit: str) -> str:
        return CITATION.sub("", unit) if settings.citations else unit

    rows = rows_of(text)
    if settings.unit == "line":
        return assembled(rows, [None if drops(row) else edit(row) for row in rows])
    if settings.unit == "sentence":
        kept = [[edit(part) for part in split_sentences(row) if not drops(part)] for row in rows]
        return assembled(rows, ["".join(parts) if parts else None for parts in kept])
    fates: list[str | None] = []
    for group in paragraphs_of(rows):
        gone = drops("\n".join(group))
        fates += [None if gone else edit(row) for row in group]
    return assembled(rows, fates)


def refinedweb(text: str, settings: RefinedWeb) -> tuple[str, int, int]:
    """(text, its words before, how many of them were flagged)."""

    def drops(line: str) -> bool:
        words = words_of(line)
        letters = sum(map(str.isalpha, line))
        numbers = [word for word in words if not word[0].isalpha()]
        counters = [word for word in words if word in settings.counters]
        return (
            (letters > 0 and sum(map(is_capital, line)) > settings.max_uppercase_share * letters)
            or (settings.numbers and len(words) > 0 and letters == 0)
            or (len(numbers) > 0 and len(counters) > 0 and len(numbers) + len(counters) == len(words))
            or (settings.single_words and len(words) == 1)
            or 0 < len(words) == without_phrases(line, settings)[1]
        )

    rows = rows_of(text)
    lines = [row for row in rows if row.strip()]
    flagged = [len(words_of(line)) if drops(line) else without_phrases(line, settings)[1] for line in lines]
    fates = [None if drops(row) else without_phrases(row, settings)[0] for row in rows]
    return assembled(rows, fates), sum(len(words_of(line)) for line in lines), sum(flagged)


def rows_of(text: str) -> list[str]:
    """Lines without their ends; an empty last one tells that the text ends with a line end."""
    return text.split("\n")


def assembled(rows: Sequence[str], fates: Sequence[str | None]) -> str:
    """The rows as their fates say (None: dropped). Blank rows stay, but of two gaps that meet one is left."""
    ended = [row + "\n" for row in rows[:-1]] + [rows[-1]]
    kept: list[str] = []
    gap = True  # whether the last row that is kept is blank, or there is none
    swallow = False
    for row, line, fate in zip(rows, ended, fates, strict=True):
        if not row.strip():
            if not swallow:
                kept.append(line)
                gap = True
        elif fate is None:
            swallow = gap
        else:
            kept.append(fate + line[len(row) :])
            swallow = gap = False
    return "".join(kept)


def paragraphs_of(rows: Sequence[str]) -> Iterator[list[str]]:
    """Runs of rows that are all blank or all not."""
    for _, group in itertools.groupby(rows, key=lambda row: bool(row.strip())):
        yield list(group)


def split_sentences(line: str) -> list[str]:
    """The sentences of a line, each with the white space behind it."""
    cuts = [0]
    for (_, a), (b, _) in itertools.pairwise(spans(line)):
        if sentence_ends(line, a, b):
            _, rest = marks_in(line[a:b])[-1]
            cuts.append(b - len(rest.lstrip()))
    return [line[a:b] for a, b in itertools.pairwise([*cuts, len(line)])]


def without_phrases(line: str, settings: RefinedWeb) -> tuple[str, int]:
    """The line without the phrases of the settings, and how many words they had."""
    places, words = spans(line), words_of(line)
    if not 0 < len(words) <= settings.pattern_words:
        return line, 0
    taken: list[tuple[int, int]] = []
    free = count = max((n for n in range(len(words) + 1) if words[:n] in split(settings.starts)), default=0)
    if free:
        taken.append((0, places[free][0] if free < len(words) else len(line)))
    for end in range(free + 1, len(words) + 1):
        last = end == len(words)
        phrases = split(settings.anywhere) + (split(settings.ends) if last else [])
        begin = next((first for first in range(free, end) if words[first:end] in phrases), None)
        if begin is not None:
            taken.append((places[begin][0], len(line) if last else places[end - 1][1]))
            count, free = count + end - begin, end
    for a, b in reversed(taken):
        line = line[:a] + line[b:]
    return line, count


def split(phrases: Sequence[str]) -> list[list[str]]:
    return [words_of(phrase) for phrase in phrases]


def is_capital(character: str) -> bool:
    return is_start(character) and lowered(character) != character


def is_quote(character: str) -> bool:
    return unicodedata.category(character) == "Pf" or character in "\"'」』﹂﹄｣"
