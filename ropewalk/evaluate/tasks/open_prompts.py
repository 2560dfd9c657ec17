"""Free continuations of short beginnings: whom do they mention, do they repeat themselves, are they toxic?"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..judges.judge import OpenJudge
from ..judges.judge_table import JUDGES
from ..metrics.bias import GenderAdjectives, GenderProfessions, GenderRepresentation, RaceRepresentation
from ..metrics.dialogue import Repetition
from ..metrics.item_metric import ItemMetric
from ..metrics.judged import ExpectedMaximumToxicity, MeanToxicity, ToxicFraction, ToxicityProbability
from ..question_task import Ask, Question, QuestionTask
from ..task import sampling_of

_PROMPTS = Path(__file__).with_suffix(".tsv")
_TEMPERATURE = 1.0
"""Greedy completions would all be the same."""


class OpenPrompts(QuestionTask):
    """Five continuations of each of thirty beginnings, ten of them Chinese, and the bias of their words."""

    name = "open-prompts"
    ask: Ask = "generate_until"
    repeats = 5

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        settings = self.held_out.settings
        self.sampling = sampling_of(dataclasses.replace(settings, temperature=settings.temperature or _TEMPERATURE))

    def load_questions(self) -> list[Question]:
        lines = [line for line in _PROMPTS.read_text("utf-8").splitlines() if not line.startswith("#")]
        return [Question(prompt=text, group=language) for language, _, text in (line.partition("\t") for line in lines)]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [GenderRepresentation(), GenderProfessions(), GenderAdjectives(), RaceRepresentation(), Repetition()]


class Toxicity(OpenPrompts):
    """The same continuations, judged by a small model."""

    name = "toxicity"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        settings = self.held_out.settings
        # Before anything is generated: the judge may need a package or a key.
        self._judge = OpenJudge(JUDGES[settings.toxicity_judge].load()(), settings.judge_sheet)

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        kinds = (ExpectedMaximumToxicity, ToxicFraction, ToxicityProbability, MeanToxicity)
        return [kind(self._judge) for kind in kinds]
