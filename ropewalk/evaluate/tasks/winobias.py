"""WinoBias (Zhao et al. 2018): whom does the pronoun mean, with and against the stereotype of an occupation?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ropewalk.base.errors import DataError

from ..metrics.item_metric import ItemMetric
from ..metrics.pair_bias import AntecedentAccuracy, AntiAccuracy, ProAccuracy, StereotypeGap
from ..question_task import Ask, Question, QuestionTask
from .bias_data import bias_file

_SPLIT = "dev"
_PRONOUNS = {"he", "him", "his", "she", "her", "hers"}
_MARKED = re.compile(r"\[([^\]]+)\]")


class WinoBias(QuestionTask):
    """Asks for the person as the continuation of `"she" refers to the`; the two people of the sentence are choices."""

    name = "winobias"
    ask: Ask = "multiple_choice"

    def load_questions(self) -> list[Question]:
        folder = self.held_out.settings.bias_folder
        files = {
            (stereotype, kind): bias_file(folder, f"{stereotype}_stereotyped_type{kind}.txt.{_SPLIT}", self.name)
            for kind in (1, 2)
            for stereotype in ("pro", "anti")
        }
        lines = {key: path.read_text("utf-8").splitlines() for key, path in files.items()}
        spans = {_person(span) for rows in lines.values() for row in rows for span in _MARKED.findall(row)}
        people = spans - _PRONOUNS
        return [
            _question(row, stereotype, kind, people, f"{files[stereotype, kind]}:{number}")
            for (stereotype, kind), rows in lines.items()
            for number, row in enumerate(rows, 1)
            if row.strip()
        ]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [StereotypeGap(), AntecedentAccuracy(), ProAccuracy(), AntiAccuracy()]


def _question(row: str, stereotype: str, kind: int, people: set[str], where: str) -> Question:
    """`12 [The clerk] called the cook because [she] was late.` as a question."""
    marked = _MARKED.findall(row)
    text = re.sub(r"^\d+\s+", "", row.strip())
    pronouns = [span for span in marked if span.lower() in _PRONOUNS]
    named = [_person(span) for span in marked if span.lower() not in _PRONOUNS]
    if len(named) != 1 or not pronouns:
        raise DataError(f"{where}: a line has one person and a pronoun in brackets, unlike `{text}`")
    plain = _MARKED.sub(r"\1", text)
    bare = _MARKED.sub("", text).lower()
    others = [each for each in people if re.search(rf"\b{re.escape(each)}\b", bare)]
    if not others:
        raise DataError(f"{where}: no second person in `{text}`")
    choices = sorted([named[0], max(others, key=len)], key=plain.lower().index)
    return Question(
        prompt=f'{plain} In this sentence, "{pronouns[0]}" refers to the',
        choices=tuple(f" {each}" for each in choices),
        gold=(choices.index(named[0]),),
        group=f"type {kind}",
        document={"stereotype": stereotype, "type": kind},
    )


def _person(span: str) -> str:
    """`The developer` -> `developer`; pronouns stay."""
    return re.sub(r"^(?:the|a|an)\s+", "", span.strip().lower())
