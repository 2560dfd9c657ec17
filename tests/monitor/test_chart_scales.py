"""Scales and charts: ticks are nice, inside, and few; charts draw what they are given."""

from __future__ import annotations

import itertools
import math

from hypothesis import assume, given
from hypothesis import strategies as st

from ropewalk.monitor.draw.chart import MOST_POINTS, Chart, Series, better_x, figure, thinned
from ropewalk.monitor.draw.scale import Scale, linear_ticks, log_ticks, tick_labels

NUMBERS = st.floats(-1e12, 1e12, allow_nan=False)
POSITIVE = st.floats(1e-9, 1e12)


def assert_good(ticks: list[float], low: float, high: float, most: int) -> None:
    assert len(ticks) <= most
    assert all(low <= tick <= high for tick in ticks)
    assert all(a < b for a, b in itertools.pairwise(ticks))


@given(NUMBERS, NUMBERS, st.integers(1, 20))
def test_linear_ticks_are_inside_increasing_and_few(a: float, b: float, most: int) -> None:
    low, high = sorted((a, b))
    assert_good(linear_ticks(low, high, most), low, high, most)


@given(POSITIVE, POSITIVE, st.integers(2, 20))
def test_logarithmic_ticks_are_inside_increasing_and_few(a: float, b: float, most: int) -> None:
    low, high = sorted((a, b))
    assert_good(log_ticks(low, high, most), low, high, most)


@given(NUMBERS, st.floats(1e-3, 1e6), st.integers(3, 20))
def test_linear_ticks_are_one_two_or_five_times_a_power_of_ten_apart(low: float, span: float, most: int) -> None:
    assume(span > 1e-6 * abs(low))
    ticks = linear_ticks(low, low + span, most)
    assert len(ticks) >= 1
    for a, b in itertools.pairwise(ticks):
        lead = (b - a) / 10 ** math.floor(math.log10(b - a) + 1e-6)
        assert min(abs(lead - nice) for nice in (1, 2, 5, 10)) < 1e-3


@given(NUMBERS | st.just(0.0), st.floats(1e-9, 1e6), st.integers(2, 12))
def test_no_two_ticks_have_the_same_label(low: float, span: float, most: int) -> None:
    assume(span > 1e-3 * abs(low))
    labels = tick_labels(linear_ticks(low, low + span, most))
    assert len(labels) == len(set(labels))


@given(POSITIVE, POSITIVE, st.sampled_from(["linear", "log"]))
def test_a_scale_sends_the_ends_of_its_range_to_the_ends_of_the_axis(a: float, b: float, kind: str) -> None:
    low, high = sorted((a, b))
    assume(high > low * 1.001)
    scale = Scale(low, high, 40, 500, "log" if kind == "log" else "linear")
    assert math.isclose(scale(low), 40, abs_tol=1e-6)
    assert math.isclose(scale(high), 500, abs_tol=1e-6)


def test_labels_are_as_short_as_they_are_exact() -> None:
    assert tick_labels([0, 0.001, 0.002]) == ["0", "0.001", "0.002"]
    assert tick_labels([0, 5000, 10_000, 15_000]) == ["0", "5 k", "10 k", "15 k"]
    assert tick_labels([0, 5e-5, 1e-4, 1.5e-4]) == ["0", "5e-5", "1e-4", "1.5e-4"]
    assert tick_labels([1000, 1500, 2000]) == ["1000", "1500", "2000"]
    assert tick_labels([50, 100, 1000, 20_000]) == ["50", "100", "1 k", "20 k"]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats()), max_size=40))
def test_any_points_can_be_drawn(points: list[tuple[int, float]]) -> None:
    finite = [(x, y) for x, y in sorted(points) if abs(y) < 1e300 or not math.isfinite(y)]
    series = Series(name="x", points=[(float(x), y) for x, y in finite])
    drawn = figure(Chart(title="t", unit="u", series=[series], x_kind=better_x(series.points)))
    assert "nan" not in drawn.replace("tone", "")
    assert "inf" not in drawn


def test_a_long_line_is_thinned_to_means_and_keeps_its_end() -> None:
    series = thinned(Series(name="x", points=[(float(i), float(i)) for i in range(1, 10_001)]))
    assert len(series.points) <= MOST_POINTS
    assert series.points[-1][0] == 10_000
    assert series.points[0] == (20.0, 10.5)


def test_a_long_run_that_learns_early_gets_a_logarithmic_axis() -> None:
    steps = range(10, 20_001, 10)
    assert better_x([(float(step), step**-0.3) for step in steps]) == "log"
    assert better_x([(float(step), -float(step)) for step in steps]) == "linear"
