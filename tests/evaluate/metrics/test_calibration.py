"""Calibration, selective accuracy and fairness gaps: brute force, netcal and scikit-learn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ropewalk.base.errors import UserError
from ropewalk.base.metric import Metric, metrics_tree, read_tasks
from ropewalk.evaluate.intervals import proportion
from ropewalk.evaluate.metrics.group_gap import GroupGap
from ropewalk.evaluate.metrics.metric_table import METRICS
from ropewalk.evaluate.metrics.resampling import ends, measured
from ropewalk.evaluate.question_task import Item

from .test_choices import answered, value

LIKELIHOODS = np.round(2 * np.sin(np.arange(180.0) ** 2), 3).reshape(60, 3)
GOLD = "122222021000001022221101010221010121000111121201122101102220"
"""Drawn from the softmax of LIKELIHOODS."""
ITEMS = [answered(*row, gold=(int(gold),)) for row, gold in zip(LIKELIHOODS.tolist(), GOLD, strict=True)]


def every(name: str, items: list[Item], **settings: object) -> dict[str, Metric]:
    return {each.group or each.name: each for each in measured(METRICS[name].load()(**settings), items)}


def of_confidences(rows: list[tuple[float, bool]], group: str = "") -> list[Item]:
    """Questions with two choices, of which the first is predicted with such confidence."""
    return [answered(np.log(c), np.log(1 - c), gold=(0 if right else 1,), group=group) for c, right in rows]


def test_calibration_errors_equal_those_of_other_libraries() -> None:
    """netcal 1.4.0: ECE(15), ECE(10); scikit-learn 1.9.1: log_loss, brier_score_loss(scale_by_half=False)."""
    assert value("ece", ITEMS) == pytest.approx(0.1053305979531792, abs=1e-12)
    assert value("ece", ITEMS, bins=10) == pytest.approx(0.06451189368583013, abs=1e-12)
    assert value("nll", ITEMS) == pytest.approx(0.7680871238796878, abs=1e-12)
    assert value("brier_score", ITEMS) == pytest.approx(0.4379841398918446, abs=1e-12)


def test_calibration_errors_equal_their_definition() -> None:
    shares = np.exp(LIKELIHOODS) / np.exp(LIKELIHOODS).sum(1, keepdims=True)
    confidence, right = shares.max(1), shares.argmax(1) == np.array([*GOLD], int)
    in_order = np.argsort(confidence)
    mass = [abs(confidence[part].mean() - right[part].mean()) for part in np.array_split(in_order, 15)]
    assert value("ece_equal_mass", ITEMS) == pytest.approx(np.mean(mass), abs=1e-12)
    squares = 0.0
    for low, high in itertools.pairwise(np.linspace(0, 1, 16)):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            squares += inside.mean() * (confidence[inside].mean() - right[inside].mean()) ** 2
    assert value("rms_calibration_error", ITEMS) == pytest.approx(squares**0.5, abs=1e-12)


def test_a_confidence_on_a_border_is_in_the_lower_bin() -> None:
    # Two bins: 0.5 | 0.9, 0.7. |0.5 - 1| / 3 + |1.6 - 1| / 3
    items = of_confidences([(0.5, True), (0.9, True), (0.7, False)])
    assert value("ece", items, bins=2) == pytest.approx((0.5 + 0.6) / 3)


def test_equal_mass_splits_items_and_ties_evenly() -> None:
    rows = [(0.6, True), (0.6, False), (0.8, True)]
    # Two bins of 1.5 items: the tied items count half right, and 0.8 has two thirds of the upper bin.
    expected = (abs(1.5 * 0.6 - 0.75) + abs((0.5 * 0.6 + 0.8) - (0.25 + 1))) / 3
    for order in itertools.permutations(rows):
        assert value("ece_equal_mass", of_confidences([*order]), bins=2) == pytest.approx(expected)


def test_the_reliability_diagram_has_accuracy_confidence_and_count_of_each_bin() -> None:
    rows = [(0.95, True), (0.95, False), (0.99, True), (0.6, False)]
    diagram = every("reliability", of_confidences(rows), bins=10)
    assert [*diagram] == ["reliability", "confidence 0.500 to 0.600", "confidence 0.900 to 1.000"]
    *_, last = diagram.values()
    assert (last.value, last.n) == (2 / 3, 3)
    assert last.references["confidence"] == pytest.approx((0.95 + 0.95 + 0.99) / 3)
    # It comes back from the results file as it was.
    tree = {"format": 3, "tasks": {"sure": metrics_tree(diagram.values())}}
    (read,) = read_tasks(tree).values()
    assert [(each.group, each.value, each.n, each.references) for each in read] == [
        (each.group, each.value, each.n, each.references) for each in diagram.values()
    ]


def test_selective_accuracy_is_that_of_the_surest_questions() -> None:
    shares = np.exp(LIKELIHOODS) / np.exp(LIKELIHOODS).sum(1, keepdims=True)
    right = (shares.argmax(1) == np.array([*GOLD], int))[np.argsort(-shares.max(1))]
    found = every("selective_acc", ITEMS)
    assert {name: each.value for name, each in found.items()} == pytest.approx(
        {f"acc_at_{percent}": right[: 60 * percent // 100].mean() for percent in (25, 50, 75)}
    )
    risks = [1 - right[:first].mean() for first in range(1, 61)]
    assert value("aurc", ITEMS) == pytest.approx(np.mean(risks), abs=1e-12)
    assert found["acc_at_25"].interval == proportion("", 13, 15).interval  # of the 15 questions answered
    two = [answered(-1.0, -2.0, gold=(number % 2,), group="ab"[number % 2]) for number in range(8)]
    grouped_found = [(each.name, each.group, each.value) for each in measured(METRICS["selective_acc"].load()(), two)]
    assert grouped_found[:3] == [("acc_at_25", "", 0.5), ("acc_at_25", "a", 1.0), ("acc_at_25", "b", 0.0)]


def test_equal_confidences_have_no_order() -> None:
    rows = [(0.8, True), (0.8, False), (0.8, False), (0.8, True)]
    # The expected accuracy of any one of four is a half, and so is that of any two.
    for order in itertools.permutations(rows):
        items = of_confidences([*order])
        assert [each.value for each in every("selective_acc", items).values()] == pytest.approx([0.5] * 3)
        assert value("aurc", items) == pytest.approx(0.5)


def test_resampling_an_ordered_metric_is_resampling_its_items() -> None:
    draw = np.random.default_rng(1)
    counts = draw.multinomial(60, np.full(60, 1 / 60), size=5)
    for name in ("ece", "ece_equal_mass", "aurc", "mcc", "rms_calibration_error"):
        settings = {"bins": 7} if "e_" in name or name == "ece" else {}
        metric = METRICS[name].load()(**settings)
        table = np.array([metric.statistics(item) for item in ITEMS])
        for row, found in zip(counts, metric.weighted(table, counts), strict=True):
            repeated = [item for item, count in zip(ITEMS, row, strict=True) for _ in range(count)]
            assert value(name, repeated, **settings) == pytest.approx(found)


def test_one_name_measures_all_of_calibration() -> None:
    found = every("calibration", ITEMS)
    assert [name for name in found if "confidence" not in name] == [
        *("ece", "ece_equal_mass", "rms_calibration_error", "brier_score", "nll"),
        *("acc_at_25", "acc_at_50", "acc_at_75", "aurc", "reliability"),
    ]
    assert all(each.interval and each.n and each.signature for each in found.values())


def test_the_interval_of_a_calibrated_model_reaches_zero_and_that_of_another_does_not() -> None:
    boastful = of_confidences([(0.9, number % 2 > 0) for number in range(100)])
    for name in ("ece", "ece_equal_mass"):
        (found,) = measured(METRICS[name].load()(), ITEMS)  # whose right choices were drawn from the forecasts
        assert found.interval is not None
        assert found.interval[0] == 0 < found.value <= found.interval[1]
        (found,) = measured(METRICS[name].load()(), boastful)
        assert found.value == pytest.approx(0.4)
        assert found.interval == pytest.approx((0.3, 0.5), abs=0.02)  # 0.4 +- 1.96 x 0.05


def grouped(shares: dict[str, float], size: int) -> list[Item]:
    rows = {name: [number < share * size for number in range(size)] for name, share in shares.items()}
    return [item for name, right in rows.items() for item in of_confidences([(0.9, r) for r in right], name)]


def test_the_gap_is_that_of_the_best_and_the_worst_group() -> None:
    items = grouped({"north": 0.9, "south": 0.5, "east": 0.7}, 200)
    (gap,) = measured(GroupGap(of="acc"), items)
    assert (gap.name, gap.value, gap.n, gap.of) == ("acc_gap", pytest.approx(0.4), 3, "group")
    assert {name: gap.references[name] for name in ("north", "south")} == {"north": 0.9, "south": 0.5}
    assert gap.interval is not None
    spread = 1.96 * (0.5 * 0.5 / 200 + 0.9 * 0.1 / 200) ** 0.5
    assert gap.interval == pytest.approx((0.4 - spread, 0.4 + spread), abs=0.015)
    (brier,) = measured(METRICS["group_gap"].load()(of="brier_score"), items)
    best, worst, _ = brier.references
    assert (best, worst) == ("north", "south")  # a lower score is better
    assert brier.value == pytest.approx(brier.references["south"] - brier.references["north"])


def test_the_gap_has_the_settings_and_needs_of_its_metric() -> None:
    gap = GroupGap(of="acc_norm", delimiter="")
    assert gap.metric.delimiter == ""  # type: ignore[attr-defined]
    assert gap.for_items([]).metric is gap.metric
    assert GroupGap(of="acc_mutual_info", delimiter=" ").unconditional
    with pytest.raises(UserError, match='"reliability" has no single value'):
        GroupGap(of="reliability")


def test_the_gap_of_groups_that_are_alike_may_be_zero() -> None:
    (gap,) = measured(GroupGap(of="acc"), grouped({"a": 0.5, "b": 0.55, "c": 0.6}, 40))
    assert gap.value == pytest.approx(0.1)
    assert gap.interval is not None
    assert gap.interval[0] == 0
    assert 0.1 < gap.references["shuffled groups"] < 0.25  # chance alone gives as much
    assert measured(GroupGap(of="acc"), grouped({"a": 0.5}, 40)) == []


def test_the_interval_of_a_value_that_noise_raises_is_reversed() -> None:
    resampled, calm, loud = np.linspace(0.2, 0.4, 1001), np.zeros(100), np.full(100, 0.3)
    low, high = 0.205, 0.395  # their 2.5 and 97.5 % quantiles
    assert ends(resampled, value=0.25) == pytest.approx((low, high))
    assert ends(resampled, value=0.25, noise=calm) == pytest.approx((2 * 0.25 - high, 2 * 0.25 - low))
    assert ends(resampled, value=0.25, noise=loud) == pytest.approx((0, 2 * 0.25 - low))  # chance gives as much
    assert ends(resampled, value=0.1, noise=calm) == pytest.approx((0, 0.1))  # below all resamples: never negative
    assert ends(np.full(10, np.nan), value=0.1) is None


@pytest.mark.slow
def test_intervals_contain_the_true_calibration_error() -> None:
    """Of a calibrated model (0), and of one whose confidence is 0.2 too high."""
    draw = np.random.default_rng(0)
    for excess in (0.0, 0.2):
        contained = 0
        for _ in range(100):
            confidence = draw.uniform(0.55, 0.99, 200)
            right = draw.random(200) < confidence - excess
            (found,) = measured(METRICS["ece"].load()(), of_confidences([*zip(confidence, right, strict=True)]))
            assert found.interval is not None
            contained += found.interval[0] <= excess <= found.interval[1]
        assert contained >= 80
