"""Agreement beside published examples, the package `krippendorff` and brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import krippendorff
import numpy as np
import pytest

from ropewalk.evaluate.human.agreement import (
    alpha_interval,
    cohen_kappa,
    fleiss_interval,
    fleiss_kappa,
    krippendorff_alpha,
)

LEVELS = ("nominal", "ordinal", "interval", "ratio")
NAN = np.nan
# Krippendorff (2011), Computing Krippendorff's Alpha-Reliability, section D.
EXAMPLE = np.array(
    [
        [NAN, NAN, NAN, NAN, NAN, 3, 4, 1, 2, 1, 1, 3, 3, NAN, 3],
        [1, NAN, 2, 1, 3, 3, 4, 3, NAN, NAN, NAN, NAN, NAN, NAN, NAN],
        [NAN, NAN, 2, 1, 3, 4, 4, NAN, 2, 1, 1, 3, 3, NAN, 4],
    ]
)
# The table of 10 subjects and 14 raters that texts on Fleiss (1971) use: how many raters chose each of 5 categories.
FLEISS = [
    *([0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1]),
    *([7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7]),
]


def tables(count: int) -> list[np.ndarray]:
    """Random ratings of 2 to 6 raters, some missing."""
    found = []
    for seed in range(count):
        draw = np.random.default_rng(seed)
        raters, items = int(draw.integers(2, 7)), int(draw.integers(5, 30))
        truth = draw.integers(1, 6, items)
        ratings = np.clip(truth + draw.integers(-1, 2, (raters, items)), 0, 6).astype(float)
        ratings[draw.random(ratings.shape) < 0.25] = NAN
        found.append(ratings)
    return found


def test_krippendorffs_own_example_is_reproduced() -> None:
    found = [krippendorff_alpha(EXAMPLE, level) for level in LEVELS]
    assert found == pytest.approx([0.691, 0.807, 0.811, 0.809], abs=5e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_alpha_is_that_of_the_package_with_missing_ratings(level: str) -> None:
    for ratings in tables(40):
        expected = krippendorff.alpha(ratings, level_of_measurement=level)
        assert krippendorff_alpha(ratings, level) == pytest.approx(expected, abs=1e-12)


def test_the_resamples_of_alpha_are_alphas_of_resampled_items() -> None:
    """The quantiles of 1,000 alphas, each by the package from columns drawn as the bootstrap draws them."""
    ratings = tables(3)[2]
    pairable = ratings[:, (~np.isnan(ratings)).sum(0) >= 2]
    count = pairable.shape[1]
    drawn = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=1000)
    alphas = [krippendorff.alpha(np.repeat(pairable, times, axis=1), level_of_measurement="ordinal") for times in drawn]
    assert alpha_interval(ratings, "ordinal") == pytest.approx(np.quantile(alphas, [0.025, 0.975]), abs=1e-9)


def test_alpha_is_undefined_where_one_value_is_everywhere_or_nothing_is_shared() -> None:
    assert krippendorff_alpha(np.full((3, 4), 2.0), "ordinal") is None
    apart = np.array([[1.0, NAN], [NAN, 2.0]])
    assert krippendorff_alpha(apart, "nominal") is None
    assert alpha_interval(apart, "nominal") is None


def test_fleiss_example_is_reproduced_and_lies_in_its_interval() -> None:
    ratings = np.array([np.repeat(np.arange(5.0), row) for row in FLEISS]).T
    kappa = fleiss_kappa(ratings)
    assert kappa == pytest.approx(0.210, abs=5e-4)
    low, high = fleiss_interval(ratings)
    assert low < kappa < high
    one_missing = ratings.copy()
    one_missing[0, 0] = NAN  # the item no longer counts
    assert fleiss_kappa(one_missing) == pytest.approx(fleiss_kappa(ratings[:, 1:]))


def test_kappa_of_two_raters_is_that_of_a_published_table() -> None:
    """Cohen's kappa of the table 20, 5, 10, 15 is 0.4."""
    first = np.repeat([1.0, 1.0, 0.0, 0.0], [20, 5, 10, 15])
    second = np.repeat([1.0, 0.0, 1.0, 0.0], [20, 5, 10, 15])
    assert cohen_kappa(first, second) == pytest.approx(0.4)
    assert cohen_kappa(np.append(first, NAN), np.append(second, 1)) == pytest.approx(0.4)
    assert cohen_kappa(first[:20], second[:20]) is None


def test_nominal_alpha_by_counting_all_pairs() -> None:
    ratings = tables(1)[0]
    columns = [column[~np.isnan(column)] for column in ratings.T]
    columns = [column for column in columns if len(column) > 1]
    observed = sum(sum(a != b for a, b in itertools.permutations(column, 2)) / (len(column) - 1) for column in columns)
    everything = np.concatenate(columns)
    expected = sum(a != b for a, b in itertools.permutations(everything, 2)) / (len(everything) - 1)
    assert krippendorff_alpha(ratings, "nominal") == pytest.approx(1 - observed / expected)


REFERENCES = Path(__file__).parents[4] / "shared" / "data" / "refs" / "agreement.json"


@pytest.mark.skipif(not REFERENCES.exists(), reason="the reference values are not there")
def test_the_reference_file_is_reproduced() -> None:
    tree = json.loads(REFERENCES.read_text())
    example, fleiss = tree["krippendorff"], tree["fleiss"]
    ratings = np.array([[NAN if value is None else value for value in row] for row in example["ratings"]], float)
    names = ("nominal", "ordinal_krippendorff_0_9_0", "interval", "ratio_krippendorff_0_9_0")
    found = [krippendorff_alpha(ratings, level) for level in LEVELS]
    assert found == pytest.approx([example[name] for name in names], abs=5e-4)
    ratings = np.array([np.repeat(np.arange(5.0), row) for row in fleiss["counts"]]).T
    assert fleiss_kappa(ratings) == pytest.approx(fleiss["kappa"], abs=5e-4)
