"""Other words for the same: contractions, fillers, synonyms, spellings, abbreviations."""

from __future__ import annotations

import random
import re

from .word_lists import mapping, replaced, word_list

_FILLERS = 0.05
_SYNONYMS = 0.5
_END = r"\s*(?:$|[^\w\s'’\U000f0000-\U000ffffd])"
"""Nothing is contracted at the end of a clause: "Yes, it is."."""
_PERFECT = r"\s+(?:been|got|gone|had|become|done|made|taken|seen|come|\w+ed|\w+en)\b"
"""After these `it's` may stand for `it has`."""


def contractions(text: str, draw: random.Random, strength: float) -> str:
    """Short forms of negations, and of pronouns with verbs."""
    text = replaced(text, mapping("negations"), draw)
    return _capital(replaced(text, mapping("pronouns"), draw, unless=_END))


def expansions(text: str, draw: random.Random, strength: float) -> str:
    """Long forms; those that may stand for two stay short."""
    text = text.replace("’", "'")
    text = replaced(text, mapping("negations", backwards=True), draw)
    return _capital(replaced(text, mapping("pronouns", backwards=True), draw, unless=_PERFECT))


def fillers(text: str, draw: random.Random, strength: float) -> str:
    """Words that say nothing, set off by commas, between two words."""
    words = [word for (word,) in word_list("fillers")]

    def insert(found: re.Match[str]) -> str:
        return f", {draw.choice(words)}, " if draw.random() < _FILLERS * strength else " "

    return re.sub(r"(?<=[^\W\d_]{2}) (?=[a-z]{2})", insert, text)


def synonyms(text: str, draw: random.Random, strength: float) -> str:
    """Words of the list become others of their line, which fit in the same places."""
    others = {word: [other for other in line if other != word] for line in word_list("synonyms") for word in line}
    return replaced(text, others, draw, share=_SYNONYMS * strength)


def british_spelling(text: str, draw: random.Random, strength: float) -> str:
    return replaced(text, mapping("spelling"), draw)


def american_spelling(text: str, draw: random.Random, strength: float) -> str:
    return replaced(text, mapping("spelling", backwards=True), draw)


def abbreviations(text: str, draw: random.Random, strength: float) -> str:
    """Short forms that everybody reads alike."""
    return _one_stop(replaced(text, mapping("abbreviations"), draw))


def full_forms(text: str, draw: random.Random, strength: float) -> str:
    """Long forms of the same list; the stop of an abbreviation that ends the text stays."""
    forms = mapping("abbreviations", backwards=True)
    short = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))

    def spell(found: re.Match[str]) -> str:
        return forms[found[0]] + ("." if found[0].endswith(".") and found.end() == len(text) else "")

    return re.sub(rf"(?<![\w'’./])(?:{short})(?![\w'’])", spell, text)


def _capital(text: str) -> str:
    """The pronoun `I`, which lower-case lists write small."""
    return re.sub(r"\bi(?=(?:['’](?:m|ve|ll|d)| am| have| will| would)\b)", "I", text)


def _one_stop(text: str) -> str:
    return re.sub(r"(?<=[A-Za-z]\.)\.(?!\.)", "", text)
