"""Filters: what a task file does with completions before they are scored. Same results as lm-eval's."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ropewalk.base.errors import DataError

from .doc_fields import DocFields
from .task_file import TaskFile

Texts = list[Any]
Filter = Callable[[Texts, Mapping[str, Any]], Texts]
"""The completions of one document, and the document -> what is left."""


@dataclass(frozen=True, slots=True)
class FilterPipeline:
    """Filters in order."""

    name: str
    filters: tuple[Filter, ...]

    def apply(self, completions: Sequence[str], document: Mapping[str, Any]) -> tuple[str, ...]:
        """What is left of a document's completions."""
        found: Texts = list(completions)
        for each in self.filters:
            found = each(found, document)
        return tuple("" if text is None else text if isinstance(text, str) else str(text) for text in found)


def pipelines(file: TaskFile, fields: DocFields) -> list[FilterPipeline]:
    """The file's `filter_list`; without one the first completion counts."""
    given = file.get("filter_list")
    if not given:
        return [FilterPipeline("none", (_take_first,))]
    found = []
    for entry in given:
        if not isinstance(entry, dict) or "name" not in entry or not isinstance(entry.get("filter"), list):
            raise file.wrong("filter_list", "needs a `name` and a list `filter` in each entry")
        found.append(FilterPipeline(str(entry["name"]), tuple(_filter(file, fields, each) for each in entry["filter"])))
    if len({each.name for each in found}) < len(found):
        raise file.wrong("filter_list", "has two entries of the same name")
    return found


def _filter(file: TaskFile, fields: DocFields, entry: Any) -> Filter:
    name = entry.get("function") if isinstance(entry, dict) else None
    if name not in FILTERS:
        raise file.wrong("filter_list", f'has no filter "{name}"', f"known: {', '.join(FILTERS)}")
    settings = {key: value for key, value in entry.items() if key != "function"}
    if "filter_fn" in settings:
        settings["filter_fn"] = fields.function(settings["filter_fn"], "filter_list")
    try:
        return FILTERS[name](**settings)
    except TypeError as error:
        raise file.wrong("filter_list", f"gives {name} settings that it does not take: {error}") from None
    except re.error as error:
        raise file.wrong("filter_list", f"has a regular expression that is none: {error}") from None


def _regex(regex_pattern: str = r"#### (\-?[0-9\.\,]+)", group_select: int = 0, fallback: str = "[invalid]") -> Filter:
    pattern = re.compile(regex_pattern)

    def one(text: Any) -> str:
        matches = pattern.findall(text if isinstance(text, str) else "")
        if not matches:
            return fallback
        match = _selected(matches, group_select)
        return fallback if match is None else match.strip()

    return lambda texts, _: [one(text) for text in texts]


def _selected(matches: list[Any], index: int) -> str | None:
    """A match; of several groups the first one that is not empty."""
    try:
        match = matches[index]
    except IndexError:  # lm-eval would fail here, and one completion should not end an evaluation
        return None
    if isinstance(match, tuple):
        return next((group for group in match if group), None)
    return str(match)


def _multi_choice_regex(
    regex_pattern: str = r"#### (\-?[0-9\.\,]+)",
    group_select: int = 0,
    fallback: str = "[invalid]",
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    regexes_to_ignore: Sequence[str] | None = None,
) -> Filter:
    """The pattern; else a choice's text, which gives its letter; else a letter after a colon."""
    pattern = re.compile(regex_pattern)

    def cleaned(text: str) -> str:
        for each in regexes_to_ignore or ():
            text = re.sub(each, "", text)
        text = text.lower() if ignore_case else text
        return text.translate(_punctuation()) if ignore_punctuation else text

    def found(regex: re.Pattern[str], text: str, letters: Mapping[str, str]) -> str:
        matches = regex.findall(text)
        match = (_selected(matches, group_select) or "").strip() if matches else ""
        return letters.get(match, match)

    def apply(texts: Texts, document: Mapping[str, Any]) -> Texts:
        choices = [cleaned(choice.strip()) for choice in document["choices"]]
        letters = {choice: f"({chr(ord('A') + place)})" for place, choice in enumerate(choices)}
        # The longest first: a choice that begins like another one must not hide it.
        by_text = re.compile("|".join(sorted(map(re.escape, choices), key=len, reverse=True)))
        plain = [chr(ord("A") + place) for place in range(len(choices))]
        by_letter = re.compile(rf":[\s]*({'|'.join(plain)})")
        kept = []
        for each in texts:
            text = each if isinstance(each, str) else ""
            match = found(pattern, text, {}) or found(by_text, cleaned(text), letters)
            match = match or found(by_letter, text, {letter: f"({letter})" for letter in plain})
            kept.append(match or fallback)
        return kept

    return apply


@cache
def _punctuation() -> dict[int, None]:
    return {code: None for code in range(sys.maxunicode) if unicodedata.category(chr(code)).startswith("P")}


def _map(mapping_dict: Mapping[Any, Any] | None = None, default_value: Any = None) -> Filter:
    mapping = mapping_dict or {}
    return lambda texts, _: [mapping.get(text, default_value) for text in texts]


def _take_first(texts: Texts, _: Mapping[str, Any]) -> Texts:
    return texts[:1]


def _take_first_k(k: int) -> Filter:
    def apply(texts: Texts, _: Mapping[str, Any]) -> Texts:
        if len(texts) < k:
            raise DataError(f"the filter take_first_k wants {k} completions, and there are {len(texts)}; set `repeats`")
        return texts[:k]

    return apply


def _majority_vote(texts: Texts, _: Mapping[str, Any]) -> Texts:
    return [Counter(texts).most_common(1)[0][0]]


def _custom(filter_fn: Callable[[list[Texts], list[Mapping[str, Any]]], Iterable[Any]]) -> Filter:
    """A function of trusted folders, which gets the completions of several documents: here of one."""

    def apply(texts: Texts, document: Mapping[str, Any]) -> Texts:
        (found,) = filter_fn([texts], [document])
        return list(found) if isinstance(found, list | tuple) else [found]

    return apply


def _each(change: Callable[[str], str]) -> Callable[[], Filter]:
    return lambda: lambda texts, _: [change(text) for text in texts]


FILTERS: dict[str, Callable[..., Filter]] = {
    "regex": _regex,
    "multi_choice_regex": _multi_choice_regex,
    "take_first": lambda: _take_first,
    "take_first_k": _take_first_k,
    "majority_vote": lambda: _majority_vote,
    "remove_whitespace": _each(str.strip),
    "lowercase": _each(str.lower),
    "uppercase": _each(str.upper),
    "map": _map,
    "custom": _custom,
}
"""Filters by name: each entry takes the settings of the file."""
