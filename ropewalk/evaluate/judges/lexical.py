"""Judges of dialogue that compare words: cheap, everywhere available, and blind to paraphrase. English and Chinese."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_PIECES = re.compile(r"[\u3400-\u9fff]+|[^\W_\u3400-\u9fff]+(?:['’][^\W_]+)?")
_SENTENCE = re.compile(r"[^.!?。！？\n]+[.!?。！？]?")
_NOT = re.compile(r"\b(?:not|no|never|none|nothing|cannot|nobody)\b|n['’]t\b|[不没未别无]", re.IGNORECASE)
_OVERLAP = 0.5
_WORDS = Path(__file__).with_name("function_words.tsv")


class LexicalRelevance:
    """The cosine of the content words of a reply and of what it replies to."""

    name, version = "lexical_relevance", "1"

    def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> list[float]:
        return [_cosine(content(text), content(context)) for text, context in zip(texts, contexts, strict=True)]


class LexicalConsistency:
    """The share of the sentences of a reply that contradict none before: a contradiction has at least half of the
    content words in common, and a negation or a number that differs."""

    name, version = "lexical_consistency", "1"

    def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> list[float]:
        return [_consistency(text, context) for text, context in zip(texts, contexts, strict=True)]


def content(text: str) -> Counter[str]:
    """Words with meaning, without common endings; of Chinese, pairs of characters."""
    found: Counter[str] = Counter()
    english, between = _function_words()
    for piece in _PIECES.findall(text.lower()):
        if "\u3400" <= piece[0] <= "\u9fff":
            runs = filter(None, between.split(piece))
            found.update(run[first : first + 2] for run in runs for first in range(max(1, len(run) - 1)))
        elif piece not in english:
            found[re.sub(r"(?<=\w{3})(?:ing|ed|es|s|['’]s)$", "", piece)] += 1
    return found


@functools.cache
def _function_words() -> tuple[frozenset[str], re.Pattern[str]]:
    """English words, and a pattern of Chinese characters, that have no topic."""
    lines = dict(line.split("\t") for line in _WORDS.read_text("utf-8").splitlines() if not line.startswith("#"))
    return frozenset(lines["en"].split()), re.compile(f"[{lines['zh'].replace(' ', '')}]")


def _cosine(first: Counter[str], second: Counter[str]) -> float:
    dot = sum(count * second[word] for word, count in first.items())
    norm = math.sqrt(sum(n * n for n in first.values()) * sum(n * n for n in second.values()))
    return dot / norm if norm else 0.0


def _consistency(text: str, context: str) -> float:
    before = [_statement(each) for each in _SENTENCE.findall(context) if not each.rstrip().endswith(("?", "？"))]
    said = [_statement(each) for each in _SENTENCE.findall(text) if content(each)]
    contradicted = [any(_contradict(new, old) for old in before) for new in said]
    return 1 - sum(contradicted) / len(said) if said else 1.0


def _statement(sentence: str) -> tuple[frozenset[str], int, frozenset[str]]:
    """Content words without negations and numbers, the number of negations modulo 2, and the numbers."""
    words = {word for word in content(_NOT.sub(" ", sentence)) if not word.isdigit()}
    return frozenset(words), len(_NOT.findall(sentence)) % 2, frozenset(re.findall(r"\d+(?:\.\d+)?", sentence))


def _contradict(
    new: tuple[frozenset[str], int, frozenset[str]], old: tuple[frozenset[str], int, frozenset[str]]
) -> bool:
    shared, either = new[0] & old[0], new[0] | old[0]
    if not either or len(shared) < _OVERLAP * len(either):
        return False
    return new[1] != old[1] or bool(new[2] and old[2] and not new[2] & old[2])
