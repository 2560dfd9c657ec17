"""Small models that judge texts, and how far they agree with people.

    class Shouting:
        name, version = "shouting", "1"

        def scores(self, texts, contexts):
            return [float(text.isupper()) for text in texts]

A judge is such a class; a recipe names it as `module:attr`. A judge without human scores beside it is called
uncalibrated wherever its scores are shown.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError, UserError

LEAST = 3
"""Texts that a rank correlation needs."""


class TextJudge(Protocol):
    """Scores texts from 0 to 1."""

    name: str
    version: str

    def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> Sequence[float]:
        """One score per text. A context is what the text replies to; it may be empty."""


@dataclass(frozen=True, slots=True)
class JudgeAgreement:
    """How far a judge agrees with the mean score of people."""

    spearman: float
    alpha: float | None
    """Krippendorff's alpha for interval data between judge and people; None unless people scored from 0 to 1."""
    n: int
    """Texts."""

    def __str__(self) -> str:
        alpha = "" if self.alpha is None else f", alpha {self.alpha:.2f}"
        return f"Spearman {self.spearman:.2f}{alpha} with people on {self.n} texts"


class OpenJudge:
    """A judge that never scores the same text twice, and its agreement with people."""

    def __init__(self, judge: TextJudge, sheet: str = "") -> None:
        self._judge, self._known = judge, dict[tuple[str, str], float]()
        self.agreement = judge_agreement(judge, sheet) if sheet else None

    @property
    def label(self) -> str:
        return f"{self._judge.name} {self._judge.version}"

    @property
    def calibration(self) -> str:
        return "uncalibrated" if self.agreement is None else str(self.agreement)

    def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> list[float]:
        pairs = list(zip(texts, contexts, strict=True))
        new = list(dict.fromkeys(pair for pair in pairs if pair not in self._known))
        if new:
            found = self._judge.scores([text for text, _ in new], [context for _, context in new])
            if len(found) != len(new):
                raise UserError(f"judge `{self._judge.name}` gave {len(found)} scores for {len(new)} texts")
            self._known.update(zip(new, map(float, found), strict=True))
        return [self._known[pair] for pair in pairs]


def judge_agreement(judge: TextJudge, sheet: str | Path) -> JudgeAgreement | None:
    """The judge against a CSV sheet with columns `text` and `score`, and perhaps `context` and `judge`.

    Several scores of one text are averaged. Rows of another judge are left out; None if too few texts are left.
    """
    human = _read_sheet(Path(sheet), judge.name)
    if len(human) < LEAST:
        return None
    wanted = np.array([np.mean(scores) for scores in human.values()])
    texts, contexts = zip(*human, strict=True)
    found = np.array(judge.scores(list(texts), list(contexts)), np.float64)
    alpha = interval_alpha(found, wanted) if 0 <= wanted.min() <= wanted.max() <= 1 else None
    return JudgeAgreement(spearman(found, wanted), alpha, len(human))


def spearman(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    """The correlation of ranks, ties at their mean rank; 0 if one side is constant."""
    ranks = [_ranks(each) - (len(each) + 1) / 2 for each in (first, second)]
    norm = float(np.sqrt((ranks[0] ** 2).sum() * (ranks[1] ** 2).sum()))
    return float(ranks[0] @ ranks[1]) / norm if norm else 0.0


def interval_alpha(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    """Krippendorff's alpha of two raters without missing scores, for interval data."""
    expected = 2 * np.concatenate([first, second]).var(ddof=1)
    return float(1 - ((first - second) ** 2).mean() / expected) if expected else 1.0


def _ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: npt.NDArray[np.float64] = (last - (counts - 1) / 2)[places]
    return ranks


def _read_sheet(path: Path, judge: str) -> dict[tuple[str, str], list[float]]:
    """Scores by text and context."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; `evaluate.judge_sheet` is a CSV file of human scores") from None
    found: dict[tuple[str, str], list[float]] = {}
    for line, row in enumerate(rows, 2):
        if row.get("judge") not in (None, "", judge):
            continue
        text, score = row.get("text"), row.get("score")
        if text is None or score is None:
            raise DataError(f"{path}:{line}: no column `text` or `score`; a sheet of human scores has both")
        try:
            found.setdefault((text, row.get("context") or ""), []).append(float(score))
        except ValueError:
            raise DataError(f"{path}:{line}: the score `{score}` is no number") from None
    return found
