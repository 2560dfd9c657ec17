"""pass@k against enumeration, published examples, and the plug-in estimate that it corrects."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from ropewalk.base.errors import UserError
from ropewalk.evaluate.metrics.metric_table import METRICS
from ropewalk.evaluate.metrics.pass_at_k import PassAtK, VerdictShare, pass_at_k
from ropewalk.evaluate.metrics.resampling import measured
from ropewalk.evaluate.question_task import Item, Question


def item(verdicts: str) -> Item:
    names = {"p": "pass", "f": "fail", "t": "timeout", "x": "fault"}
    return Item(question=Question(prompt=verdicts), verdicts=tuple(names[each] for each in verdicts))


@pytest.mark.parametrize("n", range(1, 8))
def test_it_is_the_share_of_draws_with_a_right_completion(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == sum(map(any, draws)) / len(draws)


def test_it_equals_the_product_of_the_papers_program() -> None:
    for n, c, k in [(200, 3, 10), (200, 57, 100), (100, 1, 1), (1000, 999, 2), (200, 1, 100)]:
        product = 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1))) if n - c >= k else 1.0
        assert pass_at_k(n, c, k) == pytest.approx(product, abs=1e-12)


def test_it_is_exact_for_many_completions() -> None:
    n, c, k = 100_000, 1, 7
    assert pass_at_k(n, c, k) == float(Fraction(k, n))
    assert pass_at_k(2000, 1000, 1000) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0


def test_it_is_unbiased_where_the_plug_in_estimate_is_too_low() -> None:
    n, k, right = 10, 5, 0.2
    weight = [math.comb(n, c) * right**c * (1 - right) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - right) ** k
    assert sum(w * pass_at_k(n, c, k) for c, w in enumerate(weight)) == pytest.approx(truth, abs=1e-12)
    assert sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(weight)) < truth - 0.02


def test_human_evals_example_scores_one_half() -> None:
    """Its six samples of one problem, of which three are right (README of openai/human-eval: pass@1 0.4999...)."""
    found = {metric.k: measured(metric, [item("fpfppf")])[0].value for metric in (PassAtK(1), PassAtK(2))}
    assert found == {1: 0.5, 2: 0.8}


def test_the_metric_is_the_mean_over_problems_with_an_interval() -> None:
    items = [item("pf"), item("ff"), item("pp"), item("tp")]
    whole = measured(PassAtK(1), items)[0]
    assert whole.value == 0.5
    assert whole.n == 4
    assert whole.name == "pass@1"
    assert whole.signature == "k:1|estimator:unbiased"
    assert whole.interval is not None
    assert 0 <= whole.interval[0] < 0.5 < whole.interval[1] <= 1
    assert measured(PassAtK(2), items)[0].value == 0.75


def test_completions_whose_sandbox_failed_are_left_out_and_counted() -> None:
    items = [item("px"), item("xx"), item("ff")]
    assert (measured(PassAtK(1), items)[0].value, measured(PassAtK(1), items)[0].n) == (0.5, 2)
    assert (measured(PassAtK(2), items)[0].value, measured(PassAtK(2), items)[0].n) == (0.0, 1)
    assert measured(VerdictShare("fault", "sandbox_failures"), items)[0].value == 0.5
    assert measured(PassAtK(1), [item("x")]) == []


def test_without_verdicts_a_completion_is_right_if_it_equals_a_reference() -> None:
    asked = Question(prompt="2 + 2", references=("4",))
    assert PassAtK(2).statistics(Item(question=asked, predictions=("5", " 4", "3"))) == (pass_at_k(3, 1, 2), 1.0)


def test_the_table_of_metrics_has_it_with_its_setting() -> None:
    assert METRICS["pass@1"].load()().name == "pass@1"
    assert METRICS["pass@10"].load()().name == "pass@10"
    assert METRICS["pass@k"].load()(k=7).name == "pass@7"
    with pytest.raises(UserError, match="at least 1"):
        PassAtK(0)
