"""Numbers in words and digits, and dates in other orders; English."""

from __future__ import annotations

import random
import re

_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
_MONTH = "|".join(_MONTHS)
_DAY, _YEAR = r"(?P<day>3[01]|[12]\d|0?[1-9])(?:st|nd|rd|th)?", r"(?P<year>[12]\d{3})"
_DATES = [
    re.compile(rf"(?<![\w/-]){_DAY} (?P<month>{_MONTH}),? {_YEAR}(?![\w-])"),
    re.compile(rf"\b(?P<month>{_MONTH}) {_DAY},? {_YEAR}(?![\w-])"),
    re.compile(rf"(?<![\w/-]){_YEAR}-(?P<number>1[0-2]|0[1-9])-(?P<day>3[01]|[12]\d|0[1-9])(?![\w-])"),
]
_NUMBER = re.compile(r"(?<![\w.,:/$€£+*^=()\-])(?:\d{1,3}(?:,\d{3})+|\d{1,6})(?![\w:/%°^*=()\-]|[.,]\d)")
"""A whole number that stands alone: not in a sum of money, a time, a date, a formula or a name."""
_CONTEXT = rf"(?:{_MONTH}|[Cc]hapter|[Pp]age|[Ss]ection|[Vv]ersion|in|since|from|until|by|of|year) $"
"""Before years and labels."""
_SMALL = {word: number for number, word in enumerate(_ONES)} | {
    word: 10 * number for number, word in enumerate(_TENS) if number > 1
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 1_000_000}
_WORD = "|".join(sorted([*_SMALL, *_SCALES], key=len, reverse=True))
_WORDS = re.compile(
    rf"(?<![\w-])(?!(?:{'|'.join(_SCALES)})\b)(?:{_WORD})(?:(?:[ -]| and )(?:{_WORD}))*(?![\w-])", re.IGNORECASE
)


def number_words(text: str, draw: random.Random, strength: float) -> str:
    """Whole numbers below a million in words, without years and numbers of pages."""

    def spell(found: re.Match[str]) -> str:
        number = found[0].replace(",", "")
        year = len(number) == 4 and 1000 <= int(number) <= 2100 and "," not in found[0]
        if (year and re.search(_CONTEXT, text[: found.start()])) or (len(number) > 1 and number[0] == "0"):
            return found[0]
        if re.search(rf"(?:{_MONTH}|[Cc]hapter|[Pp]age|[Ss]ection|[Vv]ersion) $", text[: found.start()]):
            return found[0]
        if re.match(rf" (?:{_MONTH})\b", text[found.end() :]):
            return found[0]
        return in_words(int(number))

    return _NUMBER.sub(spell, text)


def in_words(number: int) -> str:
    """English words of 0 to 999,999, with `and` after hundreds."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    joint = " and " if 0 < rest < 100 else " "
    return f"{in_words(thousands)} thousand" + (f"{joint}{in_words(rest)}" if rest else "")


def digits(text: str, draw: random.Random, strength: float) -> str:
    """Numbers from two up in digits; `one` is mostly a pronoun, and words in odd orders are left."""

    def count(found: re.Match[str]) -> str:
        number = _value(re.findall(r"[a-z]+", found[0].lower()))
        return found[0] if number is None or number < 2 else str(number)

    return _WORDS.sub(count, text)


def _value(words: list[str]) -> int | None:
    """The number that spells itself like this; None if there is none."""
    words = [word for word in words if word != "and"]
    total, part = 0, 0
    for word in words:
        if word == "hundred":
            part *= 100
        elif word in _SCALES:
            total, part = total + part * _SCALES[word], 0
        else:
            part += _SMALL[word]
    number = total + part
    if number >= 1_000_000:
        return number if words == [words[0], "million"] else None
    spelt = [word for word in re.findall(r"[a-z]+", in_words(number)) if word != "and"]
    return number if spelt == words else None


def dates(text: str, draw: random.Random, strength: float) -> str:
    """Dates of day, month and year in another order; `08/01/1981` may mean two days and stays."""

    def rewrite(found: re.Match[str]) -> str:
        parts = found.groupdict()
        month = parts.get("month") or _MONTHS[int(parts["number"]) - 1]
        day, year, number = int(parts["day"]), parts["year"], _MONTHS.index(month) + 1
        forms = [f"{day} {month} {year}", f"{month} {day}, {year}", f"{year}-{number:02}-{day:02}"]
        return draw.choice([form for form in forms if form != found[0]])

    return re.sub("|".join(_named(each) for each in _DATES), lambda found: rewrite(_again(found[0])), text)


def _named(pattern: re.Pattern[str]) -> str:
    """The pattern without names of groups, which an alternative may not repeat."""
    return re.sub(r"\(\?P<\w+>", "(?:", pattern.pattern)


def _again(text: str) -> re.Match[str]:
    found = next(found for pattern in _DATES if (found := pattern.fullmatch(text)))
    return found
