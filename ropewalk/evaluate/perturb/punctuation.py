"""Punctuation, quotes, and a polite request before a question; English and Chinese."""

from __future__ import annotations

import random
import re

from .protected import language_of

_COMMAS = 0.5
_REQUESTS = {
    "en": ("Could you please tell me: ", "Please answer this question: ", "I would like to know: ", "Kindly tell me: "),
    "zh": ("请问：", "麻烦您告诉我：", "我想请教一下：", "请回答下面的问题："),
}


def fewer_marks(text: str, draw: random.Random, strength: float) -> str:
    """Without the marks at the ends of lines, and without half of the commas between words."""
    text = re.sub(r"(?<=\w)[.!?。！？]+(?=[^\S\n]*$)", "", text, flags=re.MULTILINE)
    commas = re.compile(r"(?<=[^\W\d]),(?= [^\W\d])")
    return commas.sub(lambda _: "" if draw.random() < _COMMAS * strength else ",", text)


def more_marks(text: str, draw: random.Random, strength: float) -> str:
    """The marks at the ends of lines twice or three times. Where there is none, a text is to be continued."""
    marks = re.compile(r"(?<=\w)[.!?！？](?=[^\S\n]*$)", re.MULTILINE)
    return marks.sub(lambda found: "..." if found[0] == "." else found[0] * draw.choice((2, 3)), text)


def curly_quotes(text: str, draw: random.Random, strength: float) -> str:
    """`"word"` and `it's` with the quotes of typesetters."""
    text = re.sub(r'"([^"\n]*)"', "“\\1”", text)
    text = re.sub(r"(?<=\w)'(?=\w)", "’", text)
    return re.sub(r"(?<![\w'])'([^'\n]+)'(?![\w'])", "‘\\1’", text)


def politeness(text: str, draw: random.Random, strength: float) -> str:
    """A request before a text that asks a question."""
    if "?" not in text and "？" not in text:
        return text
    white = text[: len(text) - len(text.lstrip())]
    return white + draw.choice(_REQUESTS[language_of(text)]) + text[len(white) :]
