"""Exact match and perplexities."""

from __future__ import annotations

import logging
import math

import pytest

from ropewalk.base.errors import UserError
from ropewalk.evaluate.metrics.exact import ExactMatch
from ropewalk.evaluate.metrics.metric_table import METRICS
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question
from ropewalk.evaluate.task import Likelihood


def matches(prediction: str, *references: str, **settings: object) -> bool:
    item = Item(question=Question(prompt="?", references=references), predictions=(prediction,))
    (found,) = measured(ExactMatch(**settings), [item])  # type: ignore[arg-type]
    return bool(found.value)


def test_what_is_ignored_is_ignored_on_both_sides() -> None:
    assert matches("Rome", "Paris", "Rome")
    assert not matches("Rome ", "Rome")
    assert matches("Rome ", "Rome", strip=True)
    assert not matches("rome", "Rome")
    assert matches("rome", "ROME", ignore_case=True)
    assert matches("R.o-me!", "Rome?", ignore_punctuation=True)
    assert not matches("答案。", "答案", ignore_punctuation=True)  # as in lm-evaluation-harness, ASCII alone
    assert matches("Rome 1", "Rome 22", ignore_numbers=True)
    assert matches("$1,234", "1234", regexes_to_ignore=[",", r"\$"])
    assert not matches("The", "the", regexes_to_ignore=["the"], ignore_case=True)  # patterns come first


def test_the_signature_says_what_is_ignored() -> None:
    assert ExactMatch().signature == "ignores:nothing"
    assert ExactMatch(ignore_case=True, regexes_to_ignore=[","]).signature == "ignores:case,/,/"
    with pytest.raises(UserError, match="regexes_to_ignore"):
        ExactMatch(regexes_to_ignore=["("])


def whole_texts(*texts: tuple[str, float]) -> list[Item]:
    return [Item(question=Question(prompt=text), likelihoods=(Likelihood(nats, 4, 0),)) for text, nats in texts]


def test_rolling_perplexities_weigh_texts_by_their_size() -> None:
    items = whole_texts(("one two  three", -6.0), ("水", -3.0))
    found = {name: measured(METRICS[name].load()(), items)[0].value for name in (*ROLLING, "bits_per_byte")}
    assert found == pytest.approx(
        {"word_perplexity": math.exp(9 / 4), "byte_perplexity": math.exp(9 / 17), "bits_per_byte": 9 / 17 / math.log(2)}
    )


ROLLING = ("word_perplexity", "byte_perplexity")


def test_perplexity_counts_each_item_once() -> None:
    (found,) = measured(METRICS["perplexity"].load()(), whole_texts(("a", -1.0), ("b", -4.0)))
    assert found.value == pytest.approx(math.exp(2.5))
    assert found.interval is not None
    assert found.interval[0] == pytest.approx(math.e)
    choices = Question(prompt="?", choices=(" a", " b"), gold=(1,))
    second = Item(question=choices, likelihoods=(Likelihood(-1.0, 1, 0), Likelihood(-2.0, 1, 0)))
    assert measured(METRICS["perplexity"].load()(), [second])[0].value == pytest.approx(math.exp(2))


def test_a_value_that_is_not_finite_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metric = METRICS["perplexity"].load()()
    items = whole_texts(("a", -1e6), ("b", -1.0))
    with caplog.at_level(logging.WARNING):
        assert measured(metric, items) == []
    assert "`perplexity` is inf over 2 items and is left out" in caplog.text
    assert [metric.score(item) for item in items] == [None, pytest.approx(math.e)]


def test_a_perplexity_says_what_a_task_lacks() -> None:
    with pytest.raises(UserError, match="loglikelihood_rolling"):
        measured(METRICS["byte_perplexity"].load()(), [Item(question=Question(prompt="a"), predictions=("b",))])
