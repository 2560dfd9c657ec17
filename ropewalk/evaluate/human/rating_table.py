"""Ratings of one question as tables: raters by items, first looks and second ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .ratings_log import Scores
from .sheet_key import SheetKey

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class RatingTable:
    """Shapes: R raters, I items. Missing ratings are nan."""

    question: str
    raters: list[str]
    first_RI: Floats
    """Ratings at the first look; of pairs, 0 if the first system is better, 1 if the second, 0.5 if neither."""
    again_RI: Floats
    """Ratings of repeated items at the second look."""
    prompts_I: npt.NDArray[np.int64]
    systems: list[str]
    """Of each item; of pairs "b over a"."""
    is_share: bool
    """Whether ratings are 0 or 1 (or between, for `no difference`)."""
    left: list[bool]
    """Of each answer to a pair that is not `no difference`: whether the text shown as A was chosen."""

    def of(self, system: str) -> npt.NDArray[np.bool_]:
        """Which items are of `system`."""
        return np.array([name == system for name in self.systems])

    @property
    def shared_RI(self) -> Floats:
        """The first looks by raters who have rated something."""
        return self.first_RI[~np.isnan(self.first_RI).all(1)]


def rating_table(key: SheetKey, scores: Scores, question: str) -> RatingTable:
    """The ratings of a question."""
    raters = list(key.sheets)
    tables = np.full((2, len(raters), len(key.items)), np.nan)
    left: list[bool] = []
    for number, (rater, lines) in enumerate(key.sheets.items()):
        for line in lines:
            score = scores.get((key.sheet_name(rater), line.id, question))
            if score is None:
                continue
            value = float(score)
            if key.mode == "pairwise":
                left += [score < 0] if score else []
                value = (1 + (-score if line.swapped else score)) / 2
            tables[int(line.repeat), number, line.item] = value
    return RatingTable(
        question=question,
        raters=raters,
        first_RI=tables[0],
        again_RI=tables[1],
        prompts_I=np.array([item.prompt for item in key.items], np.int64),
        systems=[
            item.systems[0] if len(item.systems) == 1 else " over ".join(item.systems[::-1]) for item in key.items
        ],
        is_share=key.mode != "score",
        left=left,
    )
