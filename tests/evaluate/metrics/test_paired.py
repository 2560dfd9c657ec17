"""Paired tests: values of scipy 1.17.1 and statsmodels 0.15.0, and all sign flips by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ropewalk.evaluate.metrics.paired import EXACT, holm, paired

FIRST = [0.2, 0.5, 0.9, 0.4, 0.7, 0.3, 0.8, 0.6, 0.1, 0.5, 0.55, 0.65]
SECOND = [0.3, 0.7, 0.85, 0.6, 0.75, 0.5, 0.8, 0.9, 0.2, 0.45, 0.7, 0.6]


def binary(worse: int, better: int, same: int = 80) -> tuple[list[float], list[float]]:
    return [1.0] * worse + [0.0] * better + [1.0] * same, [0.0] * worse + [1.0] * better + [1.0] * same


def test_few_items_are_tested_with_all_sign_flips() -> None:
    """scipy.stats.permutation_test(permutation_type="samples", n_resamples=inf)."""
    found = paired(FIRST, SECOND)
    assert found.test == "permutation, exact"
    assert found.difference == pytest.approx(0.09583333333333331)
    assert found.p_value == pytest.approx(0.025390625, abs=1e-12)
    gained = np.subtract(SECOND, FIRST)[:7]
    flips = [abs(np.dot(signs, gained)) for signs in itertools.product((1, -1), repeat=7)]
    expected = np.mean(np.array(flips) >= abs(gained.sum()) - 1e-12)
    assert paired(FIRST[:7], SECOND[:7]).p_value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("worse", "better", "p"), [(3, 13, 0.021270751953125), (10, 10, 1.0), (120, 160, 0.019606727290281328), (0, 0, 1)]
)
def test_right_and_wrong_answers_are_tested_by_mcnemar(worse: int, better: int, p: float) -> None:
    """statsmodels mcnemar(exact=True)."""
    found = paired(*binary(worse, better))
    assert (found.test, found.n) == ("McNemar, exact", worse + better + 80)
    assert found.p_value == pytest.approx(p, rel=1e-12)
    assert found.difference == pytest.approx((better - worse) / found.n)


def test_many_items_are_tested_with_random_sign_flips() -> None:
    """scipy.stats: 0.0029 by 200,000 flips, 0.0028 by the t-test; bootstrap interval .0273 to .1255."""
    places = np.arange(200) ** 2.0
    first = np.sin(places)
    found = paired(first.tolist(), (first + 0.5 * np.cos(places) + 0.05).tolist())
    assert found.p_value == pytest.approx(0.0029, abs=0.001)
    assert found.interval == pytest.approx((0.0273, 0.1255), abs=0.004)
    assert "20000" in found.test


def test_exact_and_random_flips_agree() -> None:
    gained = np.sin(np.arange(EXACT + 1) ** 2.0) + 0.35
    exact = paired([0.0] * EXACT, gained[:EXACT].tolist()).p_value
    # One more item that hardly differs.
    random = paired([0.0] * (EXACT + 1), [*gained[:EXACT].tolist(), 1e-12]).p_value
    assert random == pytest.approx(exact, abs=0.01)


def test_sizes_make_a_ratio_of_sums() -> None:
    found = paired([10.0, 30.0], [12.0, 24.0], sizes=[10, 30])
    assert found.difference == pytest.approx(-4 / 40)
    assert found.interval == pytest.approx((-6 / 30, 2 / 10))
    assert found.p_value == 1  # |-4| or |8|: each of the four flips is as large


def test_without_a_difference_there_is_none() -> None:
    found = paired(FIRST, FIRST)
    assert (found.difference, found.interval, found.p_value) == (0, (0, 0), 1)
    assert paired([0.5], [0.7]).interval is None


def test_p_values_are_adjusted_for_their_number() -> None:
    """statsmodels multipletests(method="holm")."""
    assert holm([0.01, 0.04, 0.03, 0.005, 0.8]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.8])
    assert holm([]) == []


def test_a_test_rejects_a_true_null_hypothesis_as_often_as_it_says() -> None:
    draw = np.random.default_rng(0)
    p_values = [paired([0.0] * 9, draw.normal(size=9).tolist()).p_value for _ in range(200)]
    assert np.mean(np.array(p_values) < 0.05) == pytest.approx(0.05, abs=0.03)
