"""Variance components and raters needed, beside simulated studies whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from ropewalk.evaluate.human.raters_needed import Components, variance_components

TRUE = Components(items=1.0, raters=0.25, rest=0.64)


def study(draw: np.random.Generator, *, raters: int, items: int) -> np.ndarray:
    """Scores by the model, raters x items."""
    of_items = draw.normal(0, TRUE.items**0.5, items)
    of_raters = draw.normal(0, TRUE.raters**0.5, (raters, 1))
    return 3 + of_items + of_raters + draw.normal(0, TRUE.rest**0.5, (raters, items))


@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_components_are_unbiased_also_for_incomplete_tables(missing: float) -> None:
    draw, found = np.random.default_rng(0), []
    for _ in range(60):
        tables = [study(draw, raters=8, items=30) for _ in range(4)]
        for table in tables:
            table[draw.random(table.shape) < missing] = np.nan
        components = variance_components(tables)
        found.append((components.items, components.raters, components.rest))
    # 240 tables: the mean of 30 x 240 items is known to 2 %, that of 8 x 240 raters to 4 %.
    assert np.mean(found, 0) == pytest.approx((1.0, 0.25, 0.64), rel=0.06)


def test_a_complete_table_gives_the_mean_squares_of_the_textbook() -> None:
    table = study(np.random.default_rng(1), raters=5, items=12)
    mean, of_items, of_raters = table.mean(), table.mean(0), table.mean(1)
    rest = ((table - of_items - of_raters[:, None] + mean) ** 2).sum() / (4 * 11)
    items = (5 * of_items.var(ddof=1) - rest) / 5
    raters = (12 * of_raters.var(ddof=1) - rest) / 12
    found = variance_components([table])
    assert (found.items, found.raters, found.rest) == pytest.approx((items, raters, rest))


def test_the_predicted_half_width_is_that_of_simulated_studies() -> None:
    draw = np.random.default_rng(2)
    for raters, items in [(2, 10), (6, 40)]:
        means = [study(draw, raters=raters, items=items).mean() for _ in range(4000)]
        assert TRUE.half_width(items=items, raters=raters) == pytest.approx(1.96 * np.std(means), rel=0.05)


def test_as_many_raters_as_needed_reach_the_half_width_and_one_fewer_does_not() -> None:
    for wanted in (0.7, 0.5, 0.42):
        raters = TRUE.raters_for(wanted, items=40)
        assert TRUE.half_width(items=40, raters=raters) <= wanted
        assert raters == 1 or TRUE.half_width(items=40, raters=raters - 1) > wanted
        items = TRUE.items_for(wanted, raters=9)
        assert TRUE.half_width(items=items, raters=9) <= wanted < TRUE.half_width(items=items - 1, raters=9)


def test_where_items_are_the_limit_no_number_of_raters_suffices() -> None:
    assert TRUE.raters_for(0.3, items=40) is None  # 1.96 sqrt(1 / 40) = 0.31
    assert TRUE.items_for(0.3, raters=9) is None  # 1.96 sqrt(0.25 / 9) = 0.33


def test_a_study_that_cannot_tell_raters_from_items_has_no_components() -> None:
    assert variance_components([np.ones((1, 5))]) is None
    assert variance_components([np.array([[1.0, 2.0, np.nan], [np.nan, np.nan, 3.0]])]) is None
