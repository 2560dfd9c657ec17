"""KoLA's creating task with ten stories of our own, in English and Chinese."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

from ..metrics.item_metric import ItemMetric
from ..metrics.self_contrast import SelfContrast
from ..question_task import Question, QuestionTask
from ..task import Generate, Request, Sampling

STORIES = Path(__file__).with_name("knowledge_creation.jsonl")
"""Ten stories written for ropewalk, about events that never happened: no model has read how they go on."""
_GIVEN = {"en": ("Events that follow:", "Story:"), "zh": ("后面发生的事：", "故事：")}


class KnowledgeCreation(QuestionTask):
    """Each story is continued twice: alone, and with the events of its true continuation before it."""

    name = "knowledge-creation"
    ask = "generate_until"
    sampling = Sampling(max_new_tokens=128, stop=("\n\n",))
    level = "KC"

    def load_questions(self) -> Sequence[Question]:
        rows = [orjson.loads(line) for line in STORIES.read_bytes().splitlines()]
        return [
            Question(prompt=row["story"], references=(row["continuation"],), group=row["language"], document=row)
            for row in rows
        ]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return (SelfContrast(), SelfContrast(variant="paper"))

    def requests_of(self, question: Question) -> list[Request]:
        events, story = _GIVEN[question.group]
        listed = "".join(f"- {event}\n" for event in question.document["events"])
        asked = question.preamble + f"{story}\n{question.prompt}"
        return [Generate(prompt, self.sampling) for prompt in (asked, f"{events}\n{listed}\n{asked}")]
