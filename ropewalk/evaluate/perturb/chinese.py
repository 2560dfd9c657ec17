"""Chinese: characters of the same sound or a similar shape, traditional and simplified, widths, numbers, particles."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping

from .word_lists import word_list

_SLIPS = 0.1
_PARTICLES = 0.3
_DIGITS = "零一二三四五六七八九"
_UNITS = {"十": 10, "百": 100, "千": 1000}
_MEASURES = "个只条本名位张种倍岁辆件次人斤米公里元块棵头匹口家座台部双对"
"""Words after which a number counts something; `一` in other places is often no number."""
_NUMBER = re.compile(rf"[两零一二三四五六七八九十百千万]+(?=[{_MEASURES}])")
_ARABIC = re.compile(r"(?<![A-Za-z0-9.,:/-])\d{1,8}(?![\d.,:/%-]|[A-Za-z])")
_HALF, _FULL = ",;:?!()", "，；：？！（）"
_WIDE = "０１２３４５６７８９"


def homophones(text: str, draw: random.Random, strength: float) -> str:
    return _slips(text, "homophones", draw, strength)


def similar_shapes(text: str, draw: random.Random, strength: float) -> str:
    return _slips(text, "shapes", draw, strength)


def traditional(text: str, draw: random.Random, strength: float) -> str:
    """Character by character: of the forms of one simplified character, the commonest."""
    return text.translate(_scripts()[0])


def simplified(text: str, draw: random.Random, strength: float) -> str:
    return text.translate(_scripts()[1])


def full_width(text: str, draw: random.Random, strength: float) -> str:
    """Full-width digits, and full-width marks where a Chinese character stands beside them."""
    text = text.translate(str.maketrans("0123456789", _WIDE))
    marks = re.compile(rf"(?<=[\u3400-\u9fff\uff10-\uff19])[{re.escape(_HALF)}]|[(](?=[\u3400-\u9fff])")
    return marks.sub(lambda found: _FULL[_HALF.index(found[0])], text)


def half_width(text: str, draw: random.Random, strength: float) -> str:
    """Half-width digits and marks; the Chinese full stop becomes `.`."""
    return text.translate(str.maketrans(f"{_WIDE}{_FULL}。", f"0123456789{_HALF}."))


def chinese_numbers(text: str, draw: random.Random, strength: float) -> str:
    """Whole numbers that count something in characters; years, sums and codes stay."""

    def spell(found: re.Match[str]) -> str:
        after = text[found.end() : found.end() + 1]
        leading_zero = found[0][0] == "0" and len(found[0]) > 1
        return found[0] if leading_zero or not after or after not in _MEASURES else in_characters(int(found[0]))

    return _ARABIC.sub(spell, text)


def arabic_numbers(text: str, draw: random.Random, strength: float) -> str:
    """Numbers in characters before a measure word in digits."""

    def count(found: re.Match[str]) -> str:
        number = _value(found[0])
        # A lone `一` is mostly an article, and `一家人` and `一口气` are words.
        return found[0] if number is None or number < 2 else str(number)

    return _NUMBER.sub(count, text)


def particles(text: str, draw: random.Random, strength: float) -> str:
    """Words that say nothing after commas."""
    words = [word for (word,) in word_list("particles")]

    def insert(found: re.Match[str]) -> str:
        return found[0] + (draw.choice(words) if draw.random() < _PARTICLES * strength else "")

    return re.sub(r"，(?=[\u3400-\u9fff])", insert, text)


def in_characters(number: int) -> str:
    """Chinese characters of 0 to 99,999,999."""
    if number >= 10_000:
        high, low = divmod(number, 10_000)
        zero = "零" if 0 < low < 1000 else ""
        return f"{in_characters(high)}万{zero}{_below_ten_thousand(low) if low else ''}"
    text = _below_ten_thousand(number)
    return text[1:] if text.startswith("一十") else text


def _below_ten_thousand(number: int) -> str:
    if number == 0:
        return _DIGITS[0]
    text, skipped = "", False
    for unit, value in (("千", 1000), ("百", 100), ("十", 10), ("", 1)):
        digit, number = divmod(number, value)
        if digit:
            text += ("零" if skipped and text else "") + _DIGITS[digit] + unit
            skipped = False
        else:
            skipped = True
    return text


def _value(text: str) -> int | None:
    """The number that is written like this, with `两` for `二`; None if there is none."""
    total = part = digit = 0
    for each in text:
        if each == "万":
            total, part, digit = (total + part + digit) * 10_000, 0, 0
        elif each in _UNITS:
            part, digit = part + (digit or (1 if each == "十" else 0)) * _UNITS[each], 0
        else:
            digit = 2 if each == "两" else _DIGITS.index(each)
    number = total + part + digit
    same = number < 100_000_000 and in_characters(number) == text.replace("两", "二")
    return number if same else None


def _slips(text: str, name: str, draw: random.Random, strength: float) -> str:
    """Characters of the list become others of their line."""
    others = _others(name)
    return "".join(
        draw.choice(others[each]) if each in others and draw.random() < _SLIPS * strength else each for each in text
    )


@functools.cache
def _others(name: str) -> Mapping[str, str]:
    """Each character of a list -> the others of its line."""
    return {each: line.replace(each, "") for (line,) in word_list(name) for each in line}


@functools.cache
def _scripts() -> tuple[Mapping[int, str], Mapping[int, str]]:
    """Simplified to traditional and back; lines of the list have as many characters in both columns."""
    pairs = [pair for simple, full in word_list("traditional") for pair in zip(simple, full, strict=True)]
    return {ord(simple): full for simple, full in pairs}, {ord(full): simple for simple, full in pairs}
