"""Means, differences, self-agreement and rater rows, beside plain loops and simulated studies."""

from __future__ import annotations

import numpy as np
import pytest

from ropewalk.evaluate.human.rating_statistics import (
    differences,
    disagreements,
    position_bias,
    rater_rows,
    self_agreement,
    system_means,
)
from ropewalk.evaluate.human.rating_table import RatingTable

NAN = np.nan


def table_of(
    first: np.ndarray, again: np.ndarray | None = None, left: list[bool] | None = None, is_share: bool = False
) -> RatingTable:
    """Items in turn by systems `a` and `b`, two to a prompt."""
    raters, items = first.shape
    return RatingTable(
        question="typical",
        raters=[f"r{number + 1}" for number in range(raters)],
        first_RI=first,
        again_RI=np.full(first.shape, NAN) if again is None else again,
        prompts_I=np.arange(items) // 2,
        systems=["ab"[number % 2] for number in range(items)],
        is_share=is_share,
        left=left or [],
    )


def simulated(seed: int, *, raters: int = 6, prompts: int = 25, gap: float = 0.5) -> np.ndarray:
    draw = np.random.default_rng(seed)
    of_prompts = np.repeat(draw.normal(0, 0.8, prompts), 2)
    of_items = draw.normal(0, 0.4, 2 * prompts)
    of_raters = draw.normal(0, 0.5, (raters, 1))
    shift = np.tile([0, gap], prompts)
    return 3 + of_prompts + of_items + of_raters + shift + draw.normal(0, 0.7, (raters, 2 * prompts))


def test_means_and_paired_differences_are_those_of_plain_loops() -> None:
    first = simulated(0)
    first[np.random.default_rng(1).random(first.shape) < 0.3] = NAN
    a, b = system_means(table_of(first))
    assert a["mean"] == pytest.approx(np.nanmean(first[:, 0::2]))
    assert b["by_rater"]["r2"] == pytest.approx(np.nanmean(first[1, 1::2]))
    assert b["ratings"] == int((~np.isnan(first[:, 1::2])).sum())
    pairs = [
        (first[rater, item], first[rater, item + 1])
        for rater in range(6)
        for item in range(0, 50, 2)
        if not np.isnan(first[rater, item : item + 2]).any()
    ]
    (found,) = differences(table_of(first))
    assert found["pairs"] == len(pairs)
    assert found["difference"] == pytest.approx(np.mean([one - other for one, other in pairs]))
    signs = [np.nanmean(first[r, 0::2] - first[r, 1::2]) * found["difference"] > 0 for r in range(6)]
    assert found["raters_agreeing"] == sum(signs)


def test_intervals_cover_the_truth_over_other_raters_and_prompts() -> None:
    """200 studies with new raters and prompts: at least 90 % of the nominal 95 % intervals hold the true value. Six
    raters are few for a bootstrap of them, hence not exactly 95 %."""
    mean = paired = 0
    for seed in range(200):
        table = table_of(simulated(seed))
        low, high = system_means(table)[0]["interval"]
        mean += low <= 3 <= high
        low, high = differences(table)[0]["interval"]
        paired += low <= -0.5 <= high
    assert 0.88 <= mean / 200 <= 1
    assert 0.92 <= paired / 200 <= 1


def test_a_paired_interval_is_narrower_than_those_of_the_means() -> None:
    table = table_of(simulated(3))
    means = [each["interval"][1] - each["interval"][0] for each in system_means(table)]
    (found,) = differences(table)
    assert found["interval"][1] - found["interval"][0] < 0.8 * min(means)


def test_self_agreement_counts_repeated_items_of_each_rater() -> None:
    first = np.array([[1.0, 2, 3, 4, 5, 1], [2.0, 2, 2, 5, 5, NAN]])
    again = np.array([[1.0, 2, 4, NAN, NAN, NAN], [NAN, 4, 2, NAN, NAN, 1]])
    found = self_agreement(table_of(first, again), "ordinal")
    assert (found["ratings"], found["equal"], found["mean_difference"]) == (5, 0.6, 0.6)
    assert found["by_rater"] == {"r1": pytest.approx(2 / 3), "r2": 0.5}
    low, high = found["equal_interval"]
    assert low < 0.6 < high
    assert self_agreement(table_of(first), "ordinal") is None


def test_a_rater_row_tells_the_severe_the_contrary_and_the_constant() -> None:
    truth = np.tile([1.0, 2, 3, 4, 5, 3, 2, 4], 3)
    found = rater_rows(table_of(np.stack([truth, truth, truth - 1, 6 - truth, np.full(24, 3.0)])))
    assert [round(row["correlation"], 6) if row["correlation"] else None for row in found][2:] == [1, -1, None]
    assert found[2]["severity"] == pytest.approx(-1, abs=0.3)
    assert found[4]["spread"] == 0


def test_items_that_raters_differ_most_on_come_first() -> None:
    first = np.array([[1.0, 3, 1, 4], [5.0, 3, 2, NAN]])
    assert disagreements(table_of(first)) == [(0, 2.0), (2, 0.5)]


def test_a_preference_for_one_side_is_told() -> None:
    found = position_bias(table_of(np.ones((1, 2)), left=[True] * 18 + [False] * 2))
    assert found["first_shown"] == 0.9
    assert found["interval"][0] > 0.5
    assert position_bias(table_of(np.ones((1, 2)))) is None


def test_a_unanimous_share_has_an_interval_of_its_items() -> None:
    first = np.tile([1.0, 0.0], (3, 10))
    a, b = system_means(table_of(first, is_share=True))
    assert a["interval"] == pytest.approx((0.7225, 1), abs=1e-3)  # Wilson, 10 of 10
    assert b["interval"] == pytest.approx((0, 0.2775), abs=1e-3)
    assert differences(table_of(first, is_share=True))[0]["interval"] is None


def test_one_rater_has_intervals_over_prompts_and_one_prompt_has_none() -> None:
    assert system_means(table_of(simulated(0, raters=1)))[0]["interval"] is not None
    assert system_means(table_of(simulated(0, prompts=1)))[0]["interval"] is None
