"""CrowS-Pairs (Nangia et al. 2020): pairs of sentences that differ in the group they speak of."""

from __future__ import annotations

import ast
import csv
from collections.abc import Sequence

from ropewalk.base.errors import DataError

from ..metrics.item_metric import ItemMetric
from ..metrics.pair_bias import AgreedStereotypePreference, LikelihoodDifference, StereotypePreference
from ..question_task import Ask, Question, QuestionTask
from .bias_data import bias_file

_FILE = "crows_pairs_anonymized.csv"
_COLUMNS = ("sent_more", "sent_less", "bias_type", "annotations")


class CrowsPairs(QuestionTask):
    """Compares the log-likelihoods of the two sentences, as causal models allow; by kind of bias.

    `sent_more` is the sentence that stereotypes more, in both directions of the data.
    """

    name = "crows-pairs"
    ask: Ask = "multiple_choice"

    def load_questions(self) -> list[Question]:
        path = bias_file(self.held_out.settings.bias_folder, _FILE, self.name)
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise DataError(f"{path}: no column `{missing[0]}`; the file is data/{_FILE} of nyu-mll/crows-pairs")
            return [self._question(row) for row in rows]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        return [StereotypePreference(), AgreedStereotypePreference(), LikelihoodDifference()]

    def _question(self, row: dict[str, str]) -> Question:
        kinds = [kind for validator in ast.literal_eval(row["annotations"] or "[]") for kind in [tuple(validator)]]
        return Question(
            prompt="",
            choices=(row["sent_more"], row["sent_less"]),
            group=row["bias_type"],
            document={"agreed": bool(kinds) and {*kinds} == {(row["bias_type"],)}},
        )
