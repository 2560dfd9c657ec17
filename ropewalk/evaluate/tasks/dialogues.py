"""Dialogue: replies to the turns so far, and the right response among those of other dialogues.

A file has a dialogue per line: `{"turns": ["first speaker", "second speaker", ...], "candidates": [[...], ...]}`. Every
second turn is a reply to give, after the true turns before it. `candidates`, wrong responses of each reply, may be
absent: then replies of other dialogues are taken. Turns may also be `{"role": ..., "content": ...}`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError
from ropewalk.base.metric import Metric
from ropewalk.base.seeds import seed_for

from ..harness.table_files import read_json_lines
from ..judges.judge import OpenJudge
from ..judges.judge_table import JUDGES
from ..metrics.dialogue import RecallAt, ReciprocalRank, Repetition, distinct
from ..metrics.item_metric import ItemMetric
from ..metrics.judged import JudgedMetric
from ..perturb.protected import language_of
from ..question_task import Ask, Question, QuestionTask
from ..task import sampling_of

BUILT_IN = Path(__file__).parent / "dialogues.jsonl"
"""Ten dialogues of our own, five of them Chinese: enough to see that all works, too few to compare models."""
_CANDIDATES = 5
"""Responses to choose from, the right one included, where a file names none."""
_SPEAKERS = {"en": ("User: ", "Assistant: ", "\nUser:"), "zh": ("用户：", "助手：", "\n用户：")}


class Dialogue(QuestionTask):
    """Replies to every second turn, given the true turns before it."""

    name = "dialogue"
    ask: Ask = "generate_until"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        settings = self.held_out.settings
        self.sampling = sampling_of(settings, stop=tuple(stop for *_, stop in _SPEAKERS.values()))
        self._relevance, self._consistency = (
            OpenJudge(JUDGES[name].load()(), settings.judge_sheet)
            for name in (settings.relevance_judge, settings.consistency_judge)
        )

    def load_questions(self) -> list[Question]:
        return [reply.question for reply in _replies(self.held_out.settings.dialogues)]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [
            JudgedMetric(self._relevance, "relevance", context="last"),
            JudgedMetric(self._consistency, "consistency", context="said"),
            Repetition(),
        ]

    def metrics(self, answers: Sequence[Any]) -> list[Metric]:
        items = self.items(answers)
        return [*super().metrics(answers), *distinct(items, 1), *distinct(items, 2)]


class ResponseSelection(QuestionTask):
    """Finds the true reply among candidates, by log-likelihood."""

    name = "dialogue-selection"
    ask: Ask = "multiple_choice"

    def load_questions(self) -> list[Question]:
        replies = _replies(self.held_out.settings.dialogues)
        return [_selection(reply, replies, self.held_out.seed) for reply in replies]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [RecallAt(1), RecallAt(2), ReciprocalRank()]


class _Reply:
    """A turn to give: its question, its text, and its wrong candidates."""

    def __init__(self, turns: Sequence[str], number: int, dialogue: int, wrong: Sequence[str]) -> None:
        self.text, self.dialogue, self.wrong = turns[number], dialogue, wrong
        self.language = language_of("".join(turns))
        asks, replies, _ = _SPEAKERS[self.language]
        before = [f"{(asks, replies)[index % 2]}{turn}" for index, turn in enumerate(turns[:number])]
        self.question = Question(
            prompt="\n".join([*before, replies.strip()]),
            references=(self.text,),
            group=self.language,
            document={"last": turns[number - 1], "said": "\n".join(turns[1:number:2])},
        )


def _selection(reply: _Reply, replies: Sequence[_Reply], seed: int) -> Question:
    """The question of a reply with its candidates in a drawn order."""
    draw = random.Random(seed_for(seed, "dialogue candidates", reply.question.key))
    others = [each for each in replies if each.dialogue != reply.dialogue and each.text != reply.text]
    same = [each.text for each in others if each.language == reply.language] or [each.text for each in others]
    wrong = list(reply.wrong) or draw.sample(same, min(_CANDIDATES - 1, len(same)))
    candidates = [reply.text, *wrong]
    draw.shuffle(candidates)
    space = " " if reply.language == "en" else ""
    return Question(
        prompt=reply.question.prompt,
        choices=tuple(space + each for each in candidates),
        gold=(candidates.index(reply.text),),
        references=(reply.text,),
        group=reply.language,
    )


def _replies(file: str) -> list[_Reply]:
    """The replies of all dialogues of a file, by default of the built-in one."""
    path, found = Path(file) if file else BUILT_IN, []
    for number, row in read_json_lines(path):
        try:
            turns = [turn if isinstance(turn, str) else turn["content"] for turn in row["turns"]]
            wrong = row.get("candidates") or []
            found += [
                _Reply(turns, index, number, wrong[index // 2] if index // 2 < len(wrong) else ())
                for index in range(1, len(turns), 2)
            ]
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f'{path}:{number}: no dialogue ({error}); a line is {{"turns": ["...", "..."]}}') from None
    if not found:
        raise DataError(f"{path}: no dialogue has a second turn")
    return found
