"""Values that lm-evaluation-harness 0.4.13 computes from the same likelihoods and texts (`process_results` of its
tasks, then its aggregations)."""

from __future__ import annotations

import numpy as np
import pytest

from ropewalk.evaluate.metrics.metric_table import METRICS
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question
from ropewalk.evaluate.task import Likelihood

TEXTS = ("no", "maybe so", "是的", "a rather longer answer, indeed")


def question(number: int) -> Item:
    """A question with two choices, their likelihoods, and those after an empty context."""
    choices = (TEXTS[number % 4], TEXTS[(number // 4 + number + 1) % 4])
    places = np.arange(4 * number, 4 * number + 4.0)
    sizes = [len(choices[0]), len(choices[1]), 1, 1]
    likely = np.round((6 * np.sin(places**2) - 8) * sizes / 4, 3).tolist()
    greedy = np.sin(3 * places**2) > 0.6
    return Item(
        question=Question(
            prompt=str(number),
            choices=tuple(f" {choice}" for choice in choices),
            gold=(int(np.sin(number * number) > -0.2),),
        ),
        likelihoods=tuple(Likelihood(each, 1, int(g)) for each, g in zip(likely, greedy, strict=True)),
    )


QUESTIONS = [question(number) for number in range(60)]
WHOLE = [
    Item(question=Question(prompt=text), likelihoods=(Likelihood(nats, 3, 0),))
    for text, nats in (("one two\n three  four", -31.5), (" 水 是 生命", -20.25), ("x" * 50, -77.0))
]
ENDINGS = [
    Item(question=Question(prompt="?", choices=(" x",)), likelihoods=(Likelihood(nats, 1, greedy),))
    for nats, greedy in ((-1.5, 1), (-4.25, 0), (-3.0, 1))
]


@pytest.mark.parametrize(
    ("name", "items", "expected"),
    [
        ("acc", QUESTIONS, 0.6333333333333333),
        ("acc_norm", QUESTIONS, 0.5166666666666667),
        ("acc_bytes", QUESTIONS, 0.6166666666666667),
        ("acc_mutual_info", QUESTIONS, 0.65),
        ("exact_match", QUESTIONS, 0.26666666666666666),
        ("f1", QUESTIONS, 0.65625),
        ("mcc", QUESTIONS, 0.26339285714285715),
        ("brier_score", QUESTIONS, 0.638467150307805),
        ("acc", ENDINGS, 0.6666666666666666),
        ("perplexity", ENDINGS, 18.479586061009854),
        ("word_perplexity", WHOLE, 1632389.6719060543),
        ("byte_perplexity", WHOLE, 4.5480832585633175),
        ("bits_per_byte", WHOLE, 2.18525866487593),
    ],
)
def test_values_are_those_of_the_harness(name: str, items: list[Item], expected: float) -> None:
    assert measured(METRICS[name].load()(), items)[0].value == pytest.approx(expected, rel=1e-12)
