"""Calibration: does a model that is 80 % sure give the right answer 80 % of the time?

Everything comes from the likelihoods of the choices of a multiple-choice task: their softmax is the model's forecast,
the largest probability its confidence. The plug-in calibration errors below exceed the true ones, more so with few
items per bin (Kumar et al. 2019). Their intervals allow for the errors that a perfectly calibrated model would show on
as many items (`noise`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import UserError
from ropewalk.base.metric import SHARE, Better, Metric

from ..intervals import proportion
from .choices import Forecast, Length, forecast
from .item_metric import Floats, ItemMetric
from .resampling import measured, value_of
from .selective import RiskCoverage, SelectiveAccuracy

if TYPE_CHECKING:
    from ..question_task import Item

BINS = 15
"""As Guo et al. (2017)."""
_NOISE = 200
"""Simulated evaluations of a perfectly calibrated model."""


class _OfForecast(ItemMetric):
    """A metric of the forecast of each item."""

    better: Better = "lower"

    def __init__(self, *, length: Length = "", delimiter: str = " ") -> None:
        """`length` divides log-likelihoods before the softmax; `delimiter` begins each choice and has no length."""
        if length not in ("", "characters", "bytes", "tokens"):
            raise UserError(f'metric `{self.name}`: no length "{length}"; use "characters", "bytes", "tokens" or ""')
        self.length, self.delimiter = length, delimiter
        self.signature = f"softmax of log-likelihood{f' per {length[:-1]}' if length else ''}"

    def forecast(self, item: Item) -> Forecast | None:
        """The item's forecast, None if it does not count."""
        return forecast(item, self.length, metric=self.name, delimiter=self.delimiter)


class BrierScore(_OfForecast):
    """Mean squared distance of the forecast from the right choice, summed over choices: 0 to 2 (Brier 1950). Only
    questions with one right choice count."""

    name = "brier_score"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        found = self.forecast(item)
        if found is None or len(found.gold) != 1:
            return None
        right = np.arange(len(found.probabilities)) == found.gold[0]
        return float(((found.probabilities - right) ** 2).sum()), 1.0


class ChoiceNll(_OfForecast):
    """Mean negative log of the probability of the right choices among the choices."""

    name = "nll"
    unit = "nats"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        found = self.forecast(item)
        if found is None:
            return None
        right = found.probabilities[list(found.gold)].sum()
        return float(-np.log(max(right, np.finfo(float).tiny))), 1.0


class CalibrationError(_OfForecast):
    """Expected calibration error (ECE): mean distance of confidence and accuracy over bins of equal width, weighted by
    their items (Naeini et al. 2015; Guo et al. 2017). A bin includes its upper end."""

    name = "ece"

    def __init__(self, *, bins: int = BINS, length: Length = "", delimiter: str = " ") -> None:
        super().__init__(length=length, delimiter=delimiter)
        if not 1 <= bins <= 1000:
            raise UserError(f"metric `{self.name}`: {bins} bins; set 1 to 1000")
        self.bins = bins
        self.signature = f"bins:{bins}|width:equal|{self.signature}"

    def statistics(self, item: Item) -> Sequence[float] | None:
        """Count, confidence and right answers of each bin."""
        found = self.forecast(item)
        if found is None:
            return None
        row_BK = np.zeros((self.bins, 3))
        row_BK[self.bin(found.confidence)] = 1, found.confidence, found.correct
        return row_BK.ravel().tolist()

    def bin(self, confidence: float) -> int:
        """The number of the bin of a confidence."""
        return int(np.searchsorted(np.linspace(0, 1, self.bins + 1)[1:-1], confidence, side="left"))

    def value(self, sums_K: Floats) -> Floats:
        counts, gaps = self._gaps(sums_K)
        return gaps.sum(-1) / counts.sum(-1)

    def _gaps(self, sums_K: Floats) -> tuple[Floats, Floats]:
        """Items of each bin, and the distance of its summed confidence and its right answers."""
        bins_BK = sums_K.reshape(*sums_K.shape[:-1], self.bins, 3)
        return bins_BK[..., 0], np.abs(bins_BK[..., 1] - bins_BK[..., 2])

    def noise(self, table_IK: Floats, *, seed: int) -> Floats:
        """The errors of answers that are right with just the stated confidence."""
        draw, confidence_I = np.random.default_rng(seed), self.confidences(table_IK)
        drawn = (draw.random(len(table_IK)) < confidence_I for _ in range(_NOISE))
        return np.array([value_of(self, self.answered(table_IK, right_I)) for right_I in drawn])

    def confidences(self, table_IK: Floats) -> Floats:
        """The confidence in each row."""
        return table_IK[:, 1::3].sum(1)

    def answered(self, table_IK: Floats, right_I: npt.NDArray[np.bool_]) -> Floats:
        """The rows with other answers."""
        table_IK = table_IK.copy()
        table_IK[:, 2::3] = table_IK[:, 0::3] * right_I[:, None]
        return table_IK

    def score(self, item: Item) -> None:
        """No item has a calibration error of its own."""


class RmsCalibrationError(CalibrationError):
    """Root of the mean squared distance of confidence and accuracy over the bins of `ece` (Hendrycks et al. 2019)."""

    name = "rms_calibration_error"

    def value(self, sums_K: Floats) -> Floats:
        counts, gaps = self._gaps(sums_K)
        return np.sqrt((gaps**2 / np.maximum(counts, 1)).sum(-1) / counts.sum(-1))


class EqualMassCalibrationError(CalibrationError):
    """ECE over bins with equal numbers of items, in order of confidence (Nguyen and O'Connor 2015). An item on the
    border of two bins counts in both, by parts; equal confidences share theirs evenly."""

    name = "ece_equal_mass"

    def __init__(self, *, bins: int = BINS, length: Length = "", delimiter: str = " ") -> None:
        super().__init__(bins=bins, length=length, delimiter=delimiter)
        self.signature = self.signature.replace("width:equal", "mass:equal")

    def statistics(self, item: Item) -> tuple[float, float] | None:
        """Confidence, and whether it is right."""
        found = self.forecast(item)
        return (found.confidence, float(found.correct)) if found else None

    def confidences(self, table_IK: Floats) -> Floats:
        return table_IK[:, 0]

    def answered(self, table_IK: Floats, right_I: npt.NDArray[np.bool_]) -> Floats:
        return np.column_stack([table_IK[:, 0], right_I])

    def weighted(self, table_IK: Floats, counts_RI: npt.NDArray[Any]) -> Floats:
        order = np.argsort(table_IK[:, 0], kind="stable")
        confidence_I, right_I = table_IK[order].T
        last_of_ties = np.flatnonzero(np.append(np.diff(confidence_I) > 0, True))
        counts_RI = counts_RI[:, order]
        found = []
        for counts_I in counts_RI:
            summed = [np.cumsum(counts_I * each)[last_of_ties] for each in (np.ones(len(order)), confidence_I, right_I)]
            total, confidence, right = (np.concatenate([[0.0], each]) for each in summed)
            borders = np.linspace(0, total[-1], self.bins + 1)
            gaps = np.diff(np.interp(borders, total, confidence)) - np.diff(np.interp(borders, total, right))
            found.append(np.abs(gaps).sum() / total[-1])
        return np.array(found)


class Reliability(CalibrationError):
    """The reliability diagram: a group per bin with items, whose value is the accuracy, with the mean confidence and
    the number of items beside it. Over all items: accuracy and mean confidence."""

    name = "reliability"
    unit = SHARE
    better = "neither"

    def measure(self, items: Sequence[Item], *, seed: int) -> list[Metric]:
        rows = [row for item in items if (row := self.statistics(item)) is not None]
        if not rows:
            return []
        bins_BK = np.array(rows).sum(0).reshape(self.bins, 3)
        edges = np.linspace(0, 1, self.bins + 1)
        found = [self._point("", bins_BK.sum(0))]
        for number in np.flatnonzero(bins_BK[:, 0]):
            found.append(self._point(f"confidence {edges[number]:.3f} to {edges[number + 1]:.3f}", bins_BK[number]))
        return found

    def _point(self, group: str, sums_K: Floats) -> Metric:
        count, confidence, right = sums_K
        beside = {"references": {"confidence": float(confidence / count)}, "signature": self.signature}
        accuracy = proportion(self.name, round(right), round(count), group=group, **beside)
        return dataclasses.replace(accuracy, better=self.better)


class Calibration(CalibrationError):
    """All that the forecasts tell: calibration errors, Brier score, negative log-likelihood, accuracy of the surest
    answers, the reliability diagram."""

    name = "calibration"

    def measure(self, items: Sequence[Item], *, seed: int) -> list[Metric]:
        forecasts: dict[str, Any] = {"length": self.length, "delimiter": self.delimiter}
        binned = [CalibrationError, EqualMassCalibrationError, RmsCalibrationError]
        parts: list[ItemMetric] = [kind(bins=self.bins, **forecasts) for kind in binned]
        parts += [BrierScore(**forecasts), ChoiceNll(**forecasts)]
        parts += [SelectiveAccuracy(**forecasts), RiskCoverage(**forecasts), Reliability(bins=self.bins, **forecasts)]
        return [metric for part in parts for metric in measured(part, items, seed=seed)]
