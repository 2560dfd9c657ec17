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
_PATTERNS = {
    numbers: re.compile("|".join(f"(?:{each})" for each in (*_ALWAYS, *[_NUMBER] * numbers)), re.DOTALL)
    for numbers in (False, True)
}
_CHINESE = re.compile(r"[\u3400-\u9fff]")
_LETTER = re.compile(r"[^\W\d_]")
_CHINESE_SHARE = 0.2


def hidden(text: str, *, keep: Sequence[str] = (), numbers: bool = True) -> tuple[str, list[str]]:
    """`text` with a private character for each protected span, and the spans. `keep` are further strings to protect."""
    found = [each.span() for each in _PATTERNS[numbers].finditer(text)]
    for each in {each.strip() for each in keep}:
        # One letter, such as the choice " A", would be found in too many places; one private character is a hole.
        if each in text and (len(each) > 1 or each >= chr(_FIRST)):
            found += [span.span() for span in re.finditer(_whole(each), text)]
    spans: list[str] = []
    parts, end = [], 0
    for first, last in _joined(found)[:_MOST]:
        parts += [text[end:first], chr(_FIRST + len(spans))]
        spans.append(text[first:last])
        end = last
    return "".join([*parts, text[end:]]), spans


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order; those that overlap as one."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        elif last > first:
            joined.append((first, last))
    return joined


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
