"""Case, white space and accents."""

from __future__ import annotations

import random
import re
import unicodedata

_SPACES = 0.1


def lower_case(text: str, draw: random.Random, strength: float) -> str:
    return text.lower()


def upper_case(text: str, draw: random.Random, strength: float) -> str:
    return text.upper()


def title_case(text: str, draw: random.Random, strength: float) -> str:
    return re.sub(r"(?<![\w'’])[^\W\d_]", lambda found: found[0].upper(), text)


def extra_spaces(text: str, draw: random.Random, strength: float) -> str:
    """Spaces between words become two or three; those at the ends of lines stay."""

    def widen(found: re.Match[str]) -> str:
        return " " * draw.choice((2, 3)) if draw.random() < _SPACES * strength else " "

    return re.sub(r"(?<=\S) (?=\S)", widen, text)


def no_diacritics(text: str, draw: random.Random, strength: float) -> str:
    """Latin letters without marks; other scripts stay."""

    def bare(letter: str) -> str:
        parts = unicodedata.normalize("NFD", letter)
        return parts[0] if len(parts) > 1 and parts[0].isascii() else letter

    return "".join(map(bare, unicodedata.normalize("NFC", text)))
