"""Significance of differences: brute force on few items, published p-values on WMT17."""

from __future__ import annotations

import gzip
import itertools
import json

import numpy as np
import pytest

from ropewalk.base.errors import UserError
from ropewalk.evaluate.metrics.item_metric import ItemMetric
from ropewalk.evaluate.metrics.system_tests import approximate_randomization, paired_bootstrap, statistics_tables
from ropewalk.evaluate.metrics.token_f1 import TokenF1
from ropewalk.evaluate.metrics.translation import Bleu

from .texts import DATA, answered


class Mean(ItemMetric):
    name = "mean"

    def statistics(self, item: object) -> tuple[float, float]:
        raise AssertionError("tables are given")


def tables(seed: int, count: int, gain: float) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    a = draw.normal(size=count)
    b = a + gain + draw.normal(size=count)
    ones = np.ones(count)
    return np.stack([a, ones], 1), np.stack([b, ones], 1)


def test_randomization_is_the_share_of_all_swaps() -> None:
    a, b = tables(1, 9, 0.4)
    moved = (b - a)[:, 0]
    sums = [abs(np.dot(signs, moved)) for signs in itertools.product((-1, 1), repeat=9)]
    exact = np.mean(np.array(sums) >= abs(moved.sum()) - 1e-9)
    found = approximate_randomization(Mean(), a, b)
    assert found.p_value == pytest.approx(exact, abs=0.01)
    assert found.difference == pytest.approx(moved.mean())
    assert (found.resamples, found.n) == (50_000, 9)


def test_bootstrap_gives_the_interval_and_p_value_of_means() -> None:
    a, b = tables(2, 400, 0.1)
    found = paired_bootstrap(Mean(), a, b)
    moved = (b - a)[:, 0]
    error = moved.std() / 20
    assert found.interval == pytest.approx((moved.mean() - 1.96 * error, moved.mean() + 1.96 * error), abs=0.01)
    drawn = np.random.default_rng(7).choice(moved, size=(20_000, 400)).mean(1)
    moses = np.mean(np.abs(drawn) - np.abs(drawn).mean() >= abs(moved.mean()))
    assert found.p_value == pytest.approx(moses, abs=0.01)


def test_p_values_are_uniform_where_systems_do_not_differ() -> None:
    """A sound test rejects a true hypothesis at 10 % in a tenth of trials."""
    found = [approximate_randomization(Mean(), *tables(seed, 40, 0.0), resamples=200).p_value for seed in range(200)]
    assert np.mean(np.array(found) <= 0.1) == pytest.approx(0.1, abs=0.06)


def test_a_system_does_not_differ_from_itself() -> None:
    table, _ = tables(3, 20, 0.0)
    assert approximate_randomization(Mean(), table, table, resamples=100).p_value == 1
    assert paired_bootstrap(Mean(), table, table, resamples=100).p_value == 1


def test_the_same_seed_gives_the_same_p_value() -> None:
    pair = tables(4, 30, 0.2)
    for run in (approximate_randomization, paired_bootstrap):
        first, again, other = (run(Mean(), *pair, resamples=500, seed=seed) for seed in (1, 1, 2))
        assert first == again != other


def test_items_that_do_not_count_and_other_questions() -> None:
    items = [answered("a", "a"), answered("b"), answered("b c", "c")]
    metric, a, b = statistics_tables(TokenF1(), items, items)
    assert a.tolist() == b.tolist() == [[1, 1], [2 / 3, 1]]
    with pytest.raises(UserError, match="answered different questions"):
        statistics_tables(metric, items, [answered("a", "other"), *items[1:]])
    with pytest.raises(UserError, match="the same items of both systems"):
        paired_bootstrap(metric, a, b[:1])


def test_wmt17_p_values_are_those_of_moses_and_multeval() -> None:
    folder = DATA / "wmt17-en-de-systems"
    if not folder.exists():
        pytest.skip("needs the systems of WMT17, which are not part of the repository")
    expected = json.loads((folder / "expected.json").read_text())
    with gzip.open(folder / "newstest2017.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    metric, baseline = Bleu(tokenize="none"), expected["baseline"]
    moses = expected["p_value_moses_bootstrap_2000"]
    # Most others differ beyond doubt; one of them is enough.
    systems = [system for system, p_value in moses.items() if p_value] + ["newstest2017.uedin-nmt.4722.en-de"]
    found = {
        system: np.array([metric.statistics(answered(row["systems"][system], row["reference"])) for row in rows])
        for system in [baseline, *systems]
    }
    for system, table in found.items():
        value = expected["bleu_sacrebleu_2_6_0_tokenize_none"][system]
        assert metric.value(table.sum(0)) == pytest.approx(value, abs=1e-4)
    for system in systems:
        pair, p_value = (found[baseline], found[system]), moses[system]
        assert paired_bootstrap(metric, *pair).p_value == pytest.approx(p_value, abs=expected["tolerance"])
        p_value = expected["p_value_multeval_AR_10000_bleu_ter"][system][0]
        assert approximate_randomization(metric, *pair).p_value == pytest.approx(p_value, abs=expected["tolerance"])
