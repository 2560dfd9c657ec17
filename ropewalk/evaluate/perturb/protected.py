"""What no perturbation may change: numbers, code, formulas, URLs, placeholders, labels of choices and of lines.

Each protected span is replaced by one character of the supplementary private use area and put back afterwards. Such a
character is no letter, digit, space or mark, so that a perturbation passes over it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FIRST, _MOST = 0xF0000, 0xFFFD
_HIDDEN = re.compile("[\U000f0000-\U000ffffd]")

_ALWAYS = (
    r"```.*?```",
    r"`[^`\n]+`",
    r"\$\$.+?\$\$|(?<!\w)\$[^$\n\d][^$\n]*\$",
    r"(?m:^(?:def|class) \w+[(:]).*",
    r"(?m:^(?: {4}|\t).*$)",
    r"(?m:^(?:def|class|import|from|return|@\w)\b.*$)",
    r"\b(?:https?|ftp)://[^\s<>\"'）】]+|\bwww\.[^\s<>\"'）】]+",
    r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    r"\{\{?[^{}\n]*\}\}?|<[^<>\n]{1,60}>|\[[A-Z_]+\]|%\(?\w*\)?[sd]\b|_{2,}",
    r"(?m:(?:^|(?<=[\s(（]))\(?[A-Z][.):．）、](?=\s|$|[\u3000-\u9fff]))",
    r"(?<![A-Za-z])[B-HJ-Z](?![A-Za-z'’])|(?i:(?<=option )|(?<=choice )|(?<=answer ))A(?![A-Za-z])",
    r"(?m:^[A-Z][A-Za-z ]{0,24}:)",
    r"(?m:^(?:问题|答案|回答|问|答|选项|题目)[:：])",
)
"""Code, formulas, URLs, addresses, placeholders, labels of choices (`A.`, `(B)`, `B`) and of lines (`Answer:`)."""
_NUMBER = r"[A-Za-z0-9.,:/%+-]*\d(?:[A-Za-z0-9.,:/%-]*[A-Za-z0-9%])?"
_CHINESE = re.compile(r"[\u3400-\u9fff]")
_LETTER = re.compile(r"[^\W\d_]")
_CHINESE_SHARE = 0.2


def hidden(text: str, *, keep: Sequence[str] = (), numbers: bool = True) -> tuple[str, list[str]]:
    """`text` with a private character for each protected span, and the spans. `keep` are further strings to protect."""
    patterns = [_whole(each.strip()) for each in sorted(keep, key=len, reverse=True) if len(each.strip()) > 1]
    patterns += [f"(?:{each})" for each in (*_ALWAYS, *([_NUMBER] if numbers else []))]
    # Holes of `contexts` are kept too, although they are one character.
    patterns += [re.escape(each) for each in keep if len(each) == 1 and ord(each) >= _FIRST]
    spans: list[str] = []

    def hide(found: re.Match[str]) -> str:
        if not found[0] or len(spans) >= _MOST:
            return found[0]
        spans.append(found[0])
        return chr(_FIRST + len(spans) - 1)

    return re.sub("|".join(patterns), hide, text, flags=re.DOTALL), spans


def shown(text: str, spans: Sequence[str], *, otherwise: str) -> str:
    """`text` with its spans again; `otherwise` if it does not hold each of them once, in order."""
    found = [ord(each) - _FIRST for each in _HIDDEN.findall(text)]
    if found != list(range(len(spans))):
        return otherwise
    return _HIDDEN.sub(lambda each: spans[ord(each[0]) - _FIRST], text)


def language_of(text: str) -> str:
    """`zh` if at least a fifth of the letters are Chinese characters, else `en`."""
    letters = len(_LETTER.findall(text))
    return "zh" if letters and len(_CHINESE.findall(text)) >= _CHINESE_SHARE * letters else "en"


def _whole(text: str) -> str:
    """A pattern for `text` that does not begin or end within a word of Latin letters."""
    before = r"(?<![A-Za-z])" if text[0].isascii() and text[0].isalpha() else ""
    after = r"(?![A-Za-z])" if text[-1].isascii() and text[-1].isalpha() else ""
    return f"{before}{re.escape(text)}{after}"
