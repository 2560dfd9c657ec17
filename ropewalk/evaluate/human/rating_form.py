"""What raters are asked: instructions, questions and scales, by default or from a TOML file.

instructions = "Read the beginning of a text and its continuation, then answer."

[[questions]]
name = "typical"
text = "How typical of text written by a person is the continuation?"
least = 1
most = 5
low = "not at all"
high = "completely"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ropewalk.config.read import read

Mode = Literal["score", "pairwise", "binary"]
"""A score on a scale, the better of two texts, or yes and no."""
Level = Literal["nominal", "ordinal", "interval", "ratio"]
"""Levels of measurement (Stevens): what differences between two ratings mean."""
MOST_VALUES = 11
"""Of a scale: from 0 to 10. Digits choose them, and people do not tell more of them apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RatingQuestion:
    """A question about every item, answered by a whole number."""

    name: str
    """Its column in sheets and its name in results: lower-case letters, digits and `_`."""
    text: str
    """The question."""
    text_zh: str = ""
    """The question in Chinese; empty shows `text`."""
    least: int = 1
    """Lowest value. Ignored in modes `binary` (0 to 1) and `pairwise` (-1 to 1)."""
    most: int = 5
    """Highest value."""
    low: str = ""
    """Meaning of the lowest value."""
    low_zh: str = ""
    """The same in Chinese."""
    high: str = ""
    """Meaning of the highest value."""
    high_zh: str = ""
    """The same in Chinese."""

    @property
    def values(self) -> range:
        """The values that a rater may give."""
        return range(self.least, self.most + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RatingForm:
    """Instructions and questions."""

    instructions: str = ""
    """What raters read first; empty for the built-in text."""
    instructions_zh: str = ""
    """The same in Chinese."""
    questions: tuple[RatingQuestion, ...] = ()
    """Questions about every item; empty for the built-in ones."""

    def check(self) -> Iterator[tuple[str, str]]:
        """Contradictions."""
        names = [question.name for question in self.questions]
        for number, question in enumerate(self.questions):
            where = f"questions.{number}"
            if not re.fullmatch(r"[a-z][a-z0-9_]*", question.name) or question.name in COLUMNS:
                taken = ", ".join(COLUMNS)
                yield f"{where}.name", f'"{question.name}" must be lower-case letters, digits and `_`, none of {taken}'
            if names.count(question.name) > 1:
                yield f"{where}.name", f'"{question.name}" occurs twice'
            if not 1 <= question.most - question.least < MOST_VALUES:
                scale = f"{question.least} to {question.most}"
                yield f"{where}.most", f"a scale has 2 to {MOST_VALUES} values, not those of {scale}"


COLUMNS = ("sheet", "id", "number", "prompt", "text", "text_a", "text_b", "comment")
"""Columns of a sheet beside those of the questions."""


def read_form(path: Path | None, mode: Mode) -> RatingForm:
    """The form in a TOML file, with what it leaves out from the built-in one of the mode."""
    found = read(RatingForm, path).value if path else RatingForm()
    built_in = _FORMS[mode]
    own = bool(found.instructions)
    least, most = {"score": (None, None), "binary": (0, 1), "pairwise": (-1, 1)}[mode]
    questions = found.questions or built_in.questions
    return RatingForm(
        instructions=found.instructions or built_in.instructions,
        instructions_zh=found.instructions_zh or ("" if own else built_in.instructions_zh),
        questions=questions if least is None else tuple(_scaled(each, least, most) for each in questions),
    )


def _scaled(question: RatingQuestion, least: int, most: int | None) -> RatingQuestion:
    assert most is not None, "both ends are given"
    return RatingQuestion(
        **{name: getattr(question, name) for name in ("name", "text", "text_zh", "low", "low_zh", "high", "high_zh")},
        least=least,
        most=most,
    )


_ALONE = (
    "Each item shows the beginning of a text and one continuation, which a person or a program has written; you are "
    "not told which. Judge each one for itself, in the order given, and do not go by how interesting the subject is. "
    "A continuation may stop in the middle of a sentence: that is no fault. Some items may occur twice; answer as you "
    "see them now."
)
_ALONE_ZH = (
    "每一项给出一段文字的开头和一个续写。续写由人写成或由程序生成，不会告诉您是哪一种。请按给出的顺序逐项独立判断，"
    "不要受题材是否有趣的影响。续写可能在句子中间停止，这不算缺点。有些项可能出现两次，请按当时的看法回答。"
)
_FORMS: dict[Mode, RatingForm] = {
    "score": RatingForm(
        instructions=_ALONE,
        instructions_zh=_ALONE_ZH,
        questions=(
            RatingQuestion(
                name="typical",
                text="How typical of text written by a person is the continuation?",
                text_zh="这段续写在多大程度上像人写的文字？",
                low="not typical at all",
                low_zh="完全不像",
                high="very typical",
                high_zh="非常像",
            ),
            RatingQuestion(
                name="fluent",
                text="How fluent is the continuation: grammar, spelling, flow?",
                text_zh="这段续写的语言是否通顺（语法、用字、连贯）？",
                low="unreadable",
                low_zh="无法阅读",
                high="flawless",
                high_zh="毫无瑕疵",
            ),
            RatingQuestion(
                name="relevant",
                text="How well does the continuation fit what comes before it?",
                text_zh="这段续写与前文是否相关？",
                low="unrelated",
                low_zh="毫不相关",
                high="fits fully",
                high_zh="完全相关",
            ),
        ),
    ),
    "binary": RatingForm(
        instructions=_ALONE,
        instructions_zh=_ALONE_ZH,
        questions=(
            RatingQuestion(
                name="human",
                text="Was the continuation written by a person?",
                text_zh="这段续写是人写的吗？",
                least=0,
                most=1,
                low="no",
                low_zh="不是",
                high="yes",
                high_zh="是",
            ),
        ),
    ),
    "pairwise": RatingForm(
        instructions="Each item shows the beginning of a text and two continuations, A and B. Choose the better one, "
        "or say that there is no difference. Which of them stands on which side is random. A continuation may stop in "
        "the middle of a sentence: that is no fault. Some items may occur twice; answer as you see them now.",
        instructions_zh="每一项给出一段文字的开头和两个续写 A 与 B。请选出较好的一个，或表示没有差别。"
        "左右位置是随机的。续写可能在句子中间停止，这不算缺点。有些项可能出现两次，请按当时的看法回答。",
        questions=(
            RatingQuestion(
                name="better",
                text="Which continuation is better?",
                text_zh="哪一个续写更好？",
                least=-1,
                most=1,
                low="A",
                low_zh="A",
                high="B",
                high_zh="B",
            ),
        ),
    ),
}
