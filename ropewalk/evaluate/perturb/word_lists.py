"""Word lists of perturbations: files of `words/`, one entry per line, its forms separated by tabs."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent / "words"


@functools.cache
def word_list(name: str) -> tuple[tuple[str, ...], ...]:
    """The entries of `words/NAME.tsv`."""
    lines = (_FOLDER / f"{name}.tsv").read_text("utf-8").splitlines()
    return tuple(tuple(line.split("\t")) for line in lines if line and not line.startswith("#"))


@functools.cache
def mapping(name: str, *, backwards: bool = False) -> Mapping[str, str]:
    """The first form of each entry to its second one, or backwards; the first entry of a form counts."""
    found: dict[str, str] = {}
    for first, second, *_ in word_list(name):
        key, value = (second, first) if backwards else (first, second)
        found.setdefault(key, value)
    return found


def replaced(
    text: str,
    forms: Mapping[str, str] | Mapping[str, Sequence[str]],
    draw: random.Random,
    *,
    share: float = 1.0,
    unless: str = "",
) -> str:
    """`text` with this share of the listed words or phrases replaced; the case of the first letter stays. Those that
    the pattern `unless` follows stay."""

    by_lower = {form.lower(): other for form, other in forms.items()}

    def replace(found: re.Match[str]) -> str:
        if unless and re.match(unless, text[found.end() :]):
            return found[0]
        if share < 1 and draw.random() >= share:
            return found[0]
        others = by_lower[" ".join(found[0].lower().split())]
        other = others if isinstance(others, str) else draw.choice(others)
        return like(found[0], other)

    return _pattern(tuple(forms)).sub(replace, text)


def like(original: str, other: str) -> str:
    """`other` with the capitals of `original`."""
    if len(original) > 1 and original.isupper():
        return other.upper()
    return other[0].upper() + other[1:] if original[:1].isupper() else other


@functools.cache
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """Any of the words as whole words; the longest first."""
    longest = sorted(words, key=len, reverse=True)
    alternatives = "|".join(re.escape(word).replace(r"\ ", r"\s") for word in longest)
    return re.compile(rf"(?<![\w'’])(?:{alternatives})(?![\w'’])", re.IGNORECASE)
