"""Metrics of the choice that the model finds most likely, with the names and definitions of lm-evaluation-harness.

Choices are compared by the log-likelihood of their text, or by its ratio to the length of the choice. Equal values go
to the first choice. Classes of F1 and MCC are the numbers of the choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.metric import SHARE

from .item_metric import Floats, ItemMetric

if TYPE_CHECKING:
    from ..question_task import Item

Length = Literal["", "characters", "bytes", "tokens"]
"""What log-likelihoods are divided by; nothing if empty."""


def log_likelihoods(item: Item, *, metric: str) -> Floats:
    """The log-likelihoods of the item's choices."""
    count = len(item.question.choices)
    found = np.array([answer.log_probability for answer in item.likelihoods[:count]])
    if not count or len(found) < count:
        raise UserError(
            f"metric `{metric}` compares the likelihoods of choices, and question {item.question.key} has "
            f"{count} choices and {len(found)} likelihoods; use it in tasks that ask `multiple_choice`"
        )
    if np.isnan(found).any():
        raise DataError(f"question {item.question.key}: the model's log-likelihood of a choice is nan")
    return found


def gold_of(item: Item) -> tuple[int, ...]:
    """The right choices among those that there are."""
    return tuple(gold for gold in item.question.gold if 0 <= gold < len(item.question.choices))


def compared(item: Item, length: Length = "", *, metric: str, delimiter: str = " ") -> Floats:
    """What the choices are compared by."""
    scores = log_likelihoods(item, metric=metric)
    if not length:
        return scores
    texts = [choice.removeprefix(delimiter) for choice in item.question.choices]
    sizes = {
        "characters": lambda: [len(text) for text in texts],
        "bytes": lambda: [len(text.encode()) for text in texts],
        "tokens": lambda: [answer.tokens for answer in item.likelihoods[: len(texts)]],
    }[length]()
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(scores / np.array(sizes, float), nan=-np.inf, neginf=-np.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """The probabilities that the model gives to the choices of a question, which sum to one."""

    probabilities: Floats
    gold: tuple[int, ...]

    @property
    def predicted(self) -> int:
        """The most probable choice."""
        return int(np.argmax(self.probabilities))

    @property
    def confidence(self) -> float:
        """The probability of the predicted choice."""
        return float(self.probabilities.max())

    @property
    def correct(self) -> bool:
        """Whether the predicted choice is right."""
        return self.predicted in self.gold


def forecast(item: Item, length: Length = "", *, metric: str, delimiter: str = " ") -> Forecast | None:
    """The softmax of what the choices are compared by; None if there are not two, or none is right."""
    scores = compared(item, length, metric=metric, delimiter=delimiter)
    gold = gold_of(item)
    if len(scores) < 2 or not gold or not np.isfinite(scores.max()):
        return None
    shares = np.exp(scores - scores.max())
    return Forecast(shares / shares.sum(), gold)


class Accuracy(ItemMetric):
    """Share of questions whose most likely choice is right. Of a single continuation: whether greedy decoding gives it,
    as in LAMBADA."""

    name = "acc"
    unit = SHARE
    length: Length = ""

    def __init__(self, *, delimiter: str = " ") -> None:
        """`delimiter` begins each choice and does not count in its length."""
        self.delimiter = delimiter
        self.signature = f"log-likelihood per {self.length[:-1]}" if self.length else "log-likelihood"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        if len(item.question.choices) == 1:
            log_likelihoods(item, metric=self.name)
            return float(item.likelihoods[0].greedy), 1.0
        scores = compared(item, self.length, metric=self.name, delimiter=self.delimiter)
        gold = gold_of(item)
        return (float(int(np.argmax(scores)) in gold), 1.0) if gold else None


class AccuracyByCharacters(Accuracy):
    """Accuracy by the log-likelihood per character."""

    name = "acc_norm"
    length = "characters"


class AccuracyByBytes(Accuracy):
    """Accuracy by the log-likelihood per byte of UTF-8."""

    name = "acc_bytes"
    length = "bytes"


class AccuracyByTokens(Accuracy):
    """Accuracy by the log-likelihood per token."""

    name = "acc_norm_tokens"
    length = "tokens"


class MutualInformationAccuracy(ItemMetric):
    """Share of questions with a right choice first by log P(choice | context) - log P(choice)."""

    name = "acc_mutual_info"
    unit = SHARE
    unconditional = True
    signature = "log-likelihood less that after an empty context"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        conditional = log_likelihoods(item, metric=self.name)
        alone = np.array([answer.log_probability for answer in item.likelihoods[len(conditional) :]])
        if len(alone) != len(conditional):
            raise UserError(
                f"metric `{self.name}` needs the likelihood of every choice after an empty context; question "
                f"{item.question.key} has {len(alone)} of {len(conditional)}: evaluate the task again with this metric"
            )
        gold = gold_of(item)
        return (float(int(np.argmax(conditional - alone)) in gold), 1.0) if gold else None


class _Classes(ItemMetric):
    """A metric of the confusion of classes. Rows: the right class, the predicted one."""

    def statistics(self, item: Item) -> tuple[float, float] | None:
        scores = log_likelihoods(item, metric=self.name)
        gold = gold_of(item)
        return (float(gold[0]), float(np.argmax(scores))) if gold else None

    def score(self, item: Item) -> None:
        """No item has an F1 or MCC of its own."""


def _marginals(
    table_IK: Floats, counts_RI: npt.NDArray[Any], classes: list[int] | None = None
) -> tuple[Floats, Floats, Floats]:
    """Items of each class (of `classes`, or of those that occur) that are right and predicted, that are right, and that
    are predicted: resamples R, classes C."""
    classes_C = np.unique(table_IK) if classes is None else np.array(classes)
    right_IC, predicted_IC = (table_IK[:, [column]] == classes_C for column in (0, 1))
    both = [counts_RI @ each.astype(float) for each in (right_IC & predicted_IC, right_IC, predicted_IC)]
    return both[0], both[1], both[2]


class F1(_Classes):
    """F1 of predicted choices: of choice 1 (`binary`), or the mean over the classes that occur (`macro`)."""

    name = "f1"

    def __init__(self, *, average: Literal["binary", "macro"] = "binary") -> None:
        if average not in ("binary", "macro"):
            raise UserError(f'metric `f1`: no average "{average}"; use "binary" or "macro"')
        self.average = average
        self.signature = f"average:{average}|undefined:0"

    def statistics(self, item: Item) -> tuple[float, float] | None:
        row = super().statistics(item)
        if row and self.average == "binary" and max(row) > 1:
            raise UserError('metric `f1`: more than two choices have no binary F1; set average = "macro"')
        return row

    def weighted(self, table_IK: Floats, counts_RI: npt.NDArray[Any]) -> Floats:
        true_RC, right_RC, predicted_RC = _marginals(table_IK, counts_RI, [1] if self.average == "binary" else None)
        sizes_RC = right_RC + predicted_RC
        scores_RC = np.divide(2 * true_RC, sizes_RC, out=np.zeros_like(sizes_RC), where=sizes_RC > 0)
        return scores_RC.sum(1) / np.maximum(1, (sizes_RC > 0).sum(1))


class Mcc(_Classes):
    """Matthews correlation of predicted and right choices, with any number of classes (Gorodkin 2004)."""

    name = "mcc"
    signature = "undefined:0"

    def weighted(self, table_IK: Floats, counts_RI: npt.NDArray[Any]) -> Floats:
        true_RC, right_RC, predicted_RC = _marginals(table_IK, counts_RI)
        true_R, all_R = true_RC.sum(1), right_RC.sum(1)
        covariance_R = true_R * all_R - (right_RC * predicted_RC).sum(1)
        spread_R = (all_R**2 - (right_RC**2).sum(1)) * (all_R**2 - (predicted_RC**2).sum(1))
        return np.divide(covariance_R, np.sqrt(spread_R), out=np.zeros_like(spread_R), where=spread_R > 0)
