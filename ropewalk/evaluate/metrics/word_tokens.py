"""Words of text in any script: Chinese and Japanese characters are words, other scripts are split by word class."""

from __future__ import annotations

import functools
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable

HAN = "〇㐀-䶿一-鿿豈-﫿\U00020000-\U0003ffff"
"""Chinese characters, as a character class."""
KANA = "ぁ-ゖァ-ヺ\uff66-\uff9f"
_NOT_SPACED = HAN + KANA


def words(text: str) -> list[str]:
    """The words of `text` in lower case, NFKC-normalized; punctuation separates them."""
    return _pattern().findall(unicodedata.normalize("NFKC", text).lower())


def language_of(texts: Iterable[str]) -> str:
    """`zh` or `ja` if most words of `texts` are Chinese or Japanese characters, else an empty string."""
    counts: Counter[str] = Counter()
    for text in texts:
        for word in words(text):
            counts["han" if _HAN.match(word) else "kana" if _KANA.match(word) else "other"] += 1
    if counts["han"] + counts["kana"] <= counts["other"]:
        return ""
    # A fifth: Japanese prose is about half kana; Chinese texts quote a few.
    return "ja" if counts["kana"] * 4 > counts["han"] else "zh"


_HAN, _KANA = re.compile(f"[{HAN}]"), re.compile(f"[{KANA}]")


@functools.cache
def _pattern() -> re.Pattern[str]:
    # Vowel signs of Indic scripts are marks, which `\w` leaves out.
    marks = "".join(chr(each) for each in range(sys.maxunicode) if unicodedata.category(chr(each)) in ("Mn", "Mc"))
    letter = rf"(?:(?![{_NOT_SPACED}_])\w)"
    return re.compile(rf"[{_NOT_SPACED}][{marks}]*|{letter}(?:{letter}|[{marks}])*")
