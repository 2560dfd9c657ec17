"""Choice metrics: definitions of lm-evaluation-harness, values of scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.metrics.metric_table import METRICS
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question, QuestionTask
from ropewalk.evaluate.task import Likelihood, LogLikelihood

CHOICES = (" yes", " certainly not", " 不")


def answered(
    *log_probabilities: float, gold: tuple[int, ...] = (0,), choices: tuple[str, ...] = CHOICES, group: str = ""
) -> Item:
    """A question whose choices have these log-likelihoods; a choice has one token per word."""
    count = len(log_probabilities) if choices is CHOICES else len(choices)
    question = Question(prompt=str(log_probabilities), choices=choices[:count], gold=gold, group=group)
    tokens = [len(choices[number % count].split()) for number in range(len(log_probabilities))]
    answers = zip(log_probabilities, tokens, strict=True)
    return Item(question=question, likelihoods=tuple(Likelihood(each, size, 0) for each, size in answers))


def value(name: str, items: list[Item], **settings: object) -> float:
    (whole, *_) = measured(METRICS[name].load()(**settings), items)
    return whole.value


def test_lengths_are_those_of_the_choice_without_its_space() -> None:
    # Per character -1, -0.31, -2; per byte -1, -0.31, -0.67; per token -3, -2, -2.
    item = answered(-3.0, -4.0, -2.0, gold=(1,))
    assert value("acc", [item]) == 0  # choice 2
    assert value("acc_norm", [item]) == 1
    assert value("acc_norm_tokens", [item]) == 1  # a tie goes to the first
    third = answered(-3.0, -9.0, -2.0, gold=(2,))  # per byte -1, -0.69, -0.67; per character -1, -0.69, -2
    assert (value("acc_bytes", [third]), value("acc_norm", [third])) == (1, 0)
    # With the space, the choices would have 4, 14 and 4 bytes, and choice 2 would lose to choice 1 at -9.
    near = answered(-9.0, -8.9, -2.0, gold=(2,))
    assert (value("acc_bytes", [near]), value("acc_bytes", [near], delimiter="")) == (1, 1)
    assert value("acc_bytes", [answered(-9.0, -8.4, -2.0, gold=(1,))]) == 1
    assert value("acc_bytes", [answered(-9.0, -8.4, -2.0, gold=(1,))], delimiter="") == 0


def test_any_right_choice_counts_and_questions_without_one_do_not() -> None:
    items = [answered(-1.0, -2.0, gold=(0, 1)), answered(-3.0, -2.0, gold=(0, 1)), answered(-1.0, -2.0, gold=(7,))]
    (whole,) = measured(METRICS["acc"].load()(), items)
    assert (whole.value, whole.n) == (1, 2)


def test_a_single_continuation_is_right_if_greedy_decoding_gives_it() -> None:
    question = Question(prompt="?", choices=(" end",))
    greedy, other = (Item(question=question, likelihoods=(Likelihood(-5.0, 3, right),)) for right in (3, 2))
    assert value("acc", [greedy, other, other, other]) == 0.25
    assert value("exact_match", [answered(-1.0, -2.0)]) == 0
    assert value("perplexity", [greedy, other]) == pytest.approx(math.exp(5))


def test_mutual_information_subtracts_what_the_choice_alone_has() -> None:
    first = answered(-1.0, -2.0, -0.5, -3.0, gold=(1,), choices=(" a", " b"))
    assert value("acc", [first]) == 0
    assert value("acc_mutual_info", [first]) == 1
    with pytest.raises(UserError, match="evaluate the task again"):
        value("acc_mutual_info", [answered(-1.0, -2.0)])


def test_a_task_with_mutual_information_asks_for_the_choices_alone() -> None:
    class Two(QuestionTask):
        name = "two"
        ask = "multiple_choice"
        item_metrics = (METRICS["acc"].load()(), METRICS["acc_mutual_info"].load()())

        def load_questions(self) -> list[Question]:
            return [Question(prompt="Q:", choices=(" a", " b"), gold=(1,))] * 2

    task = Two(HeldOut(None, Evaluate(), seed=0))
    asked = task.requests()
    assert asked[:4] == [LogLikelihood(context, choice) for context in ("Q:", "") for choice in (" a", " b")]
    answers = [Likelihood(each, 1, 0) for each in (-1.0, -2.0, -0.5, -3.0) * 2]
    assert [(metric.name, metric.value) for metric in task.metrics(answers)] == [("acc", 0), ("acc_mutual_info", 1)]
    record = task.records(answers)[0]
    assert (record.prediction, record.scores) == (" a", {"acc": 0.0, "acc_mutual_info": 1.0})


GOLD = [0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 1, 2]
PREDICTED = [0, 1, 0, 1, 1, 0, 1, 2, 0, 0, 1, 1]


SKLEARN = {"macro": 0.6313131313131314, "mcc": 0.4897761156766282, "binary": 0.8, "binary mcc": 0.47809144373375745}


def classified(gold: list[int], predicted: list[int], classes: int = 3) -> list[Item]:
    scores = np.eye(classes)[predicted].tolist()
    return [answered(*row, gold=(right,)) for row, right in zip(scores, gold, strict=True)]


def test_f1_and_mcc_equal_those_of_scikit_learn() -> None:
    """scikit-learn 1.9.1: f1_score(average="macro"), matthews_corrcoef."""
    items = classified(GOLD, PREDICTED)
    assert value("f1", items, average="macro") == pytest.approx(SKLEARN["macro"], abs=1e-12)
    assert value("mcc", items) == pytest.approx(SKLEARN["mcc"], abs=1e-12)
    two = classified([min(1, g) for g in GOLD], [min(1, p) for p in PREDICTED], 2)
    assert value("f1", two) == pytest.approx(SKLEARN["binary"], abs=1e-12)
    assert value("mcc", two) == pytest.approx(SKLEARN["binary mcc"], abs=1e-12)
    with pytest.raises(UserError, match="macro"):
        value("f1", items)


def test_classes_that_never_occur_give_zero_and_no_nan() -> None:
    none = classified([0, 0, 0], [0, 0, 0], 2)
    assert (value("f1", none), value("mcc", none), value("f1", none, average="macro")) == (0, 0, 1)
    (found,) = measured(METRICS["mcc"].load()(), none)
    assert found.interval == (0, 0)


def test_a_metric_of_choices_says_what_a_task_lacks() -> None:
    with pytest.raises(UserError, match="multiple_choice"):
        value("acc", [Item(question=Question(prompt="?", references=("a",)), predictions=("a",))])
    with pytest.raises(DataError, match="nan"):
        value("acc", [answered(math.nan, -1.0)])
