"""Which source gives which row: the credit rule, in closed form."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.load.mixture import PERIOD, PIECES, Course, Mixture

NAMES = "abcdefgh"
WEIGHTS = st.lists(st.integers(1, 1000), min_size=1, max_size=6)


def named(weights: list[float]) -> dict[str, float]:
    return dict(zip(NAMES, weights, strict=False))


def endless(mixture: Mixture) -> Course:
    return Course(mixture, dict.fromkeys(mixture.names(), 1000))


def sources(course: Course, first: int, count: int) -> list[int]:
    """The source of each row, one row at a time."""
    found = []
    for row in range(first, first + count):
        stretch = course.at(row)
        found.append(int(stretch.cycle[0, (row - stretch.first) % PERIOD]))
    return found


def by_deficit(shares: list[int], rows: int) -> list[int]:
    """The rule as one says it, in exact numbers: the source furthest behind its share is next."""
    given_rows = [0] * len(shares)
    chosen = []
    for row in range(1, rows + 1):
        deficits = [Fraction(share * row, PERIOD) - done for share, done in zip(shares, given_rows, strict=True)]
        chosen.append(deficits.index(max(deficits)))
        given_rows[chosen[-1]] += 1
    return chosen


@settings(max_examples=15, deadline=None)
@given(weights=WEIGHTS)
def test_the_closed_form_is_the_rule_row_by_row(weights: list[int]) -> None:
    course = endless(Mixture.constant(named(weights)))
    shares = course.counts(PERIOD)
    expected = by_deficit(shares, PERIOD + 500)
    assert sources(course, 0, PERIOD + 500) == expected
    for row in (0, 1, 77, PERIOD - 1, PERIOD, PERIOD + 499):
        assert course.counts(row) == np.bincount(expected[:row], minlength=len(weights)).tolist()


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), row=st.integers(0, 10**12))
def test_counts_never_leave_the_exact_share_by_more_than_the_sources(weights: list[float], row: int) -> None:
    course = endless(Mixture.constant(named(weights)))
    shares = course.counts(PERIOD)
    assert sum(shares) == PERIOD
    assert sum(course.counts(row)) == row
    assert all(
        abs(count - Fraction(share * row, PERIOD)) <= len(weights)
        for count, share in zip(course.counts(row), shares, strict=True)
    )


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=8))
def test_shares_of_a_period_meet_the_weights_to_one_row(weights: list[float]) -> None:
    shares = endless(Mixture.constant(named(weights))).counts(PERIOD)
    exact = [weight / sum(weights) * PERIOD for weight in weights]
    # A source too small for one row gets one all the same, at the cost of the others.
    lifted = sum(max(0.0, 1 - value) for value in exact)
    assert all(abs(share - value) <= 1 + lifted for share, value in zip(shares, exact, strict=True))
    assert min(shares) >= 1


def test_a_source_of_hardly_any_weight_still_gets_a_row_a_period() -> None:
    course = endless(Mixture.constant({"a": 1.0, "b": 1e-9, "c": 1e-300, "d": 0.0}))
    assert course.counts(PERIOD) == [PERIOD - 2, 1, 1, 0]


def test_the_order_in_which_sources_are_told_decides_nothing() -> None:
    one = Course(Mixture.constant({"a": 1.0, "b": 1.0, "c": 2.0}), {"a": 5, "b": 5, "c": 5})
    other = Course(Mixture.constant({"c": 2.0, "b": 1.0, "a": 1.0}), {"c": 5, "a": 5, "b": 5})
    assert ["abc"[source] for source in sources(one, 0, 50)] == ["cab"[source] for source in sources(other, 0, 50)]
    assert one.counts(1001) == [other.counts(1001)[place] for place in (1, 2, 0)]
    assert one.row_of(2, 77) == other.row_of(0, 77)


def test_a_source_that_joins_later_leaves_the_rows_before_alone() -> None:
    mixture = Mixture.linear({"b": 5.0, "d": 3.0}, {"b": 1.0, "d": 1.0}, 20_000)
    before = Course(mixture, {"b": 10, "d": 10})
    after = Course(mixture.changed(9001, {"a": 1.0, "c": 2.0, "d": 1.0}), {"a": 10, "b": 10, "c": 10, "d": 10})
    assert ["bd"[s] for s in sources(before, 0, 9001)] == ["abcd"[s] for s in sources(after, 0, 9001)]
    assert after.counts(9001) == [0, before.counts(9001)[0], 0, before.counts(9001)[1]]
    assert after.counts(9001 + PERIOD)[2] == PERIOD // 2


@st.composite
def changing(draw: st.DrawFn) -> Mixture:
    weights = named([draw(st.integers(0, 9)) for _ in range(3)])
    weights["a"] += 1
    if draw(st.booleans()):
        end = named([draw(st.integers(0, 9)) for _ in range(2)])
        end["b"] += 1
        mixture = Mixture.linear(weights, end, draw(st.integers(1, 30_000)))
    else:
        mixture = Mixture.constant(weights)
    row = 0
    for _ in range(draw(st.integers(0, 3))):
        row += draw(st.integers(1, 9000))
        mixture = mixture.changed(row, {draw(st.sampled_from("abc")): 1.0, "c": draw(st.integers(1, 5))})
    return mixture


@settings(max_examples=20, deadline=None)
@given(mixture=changing())
def test_no_row_of_a_source_is_repeated_or_skipped_whatever_changes(mixture: Mixture) -> None:
    course = Course(mixture, {"a": 10, "b": 10, "c": 10})
    counts = [0, 0, 0]
    for row in range(32_000):
        stretch = course.at(row)
        period, slot = divmod(row - stretch.first, PERIOD)
        source = stretch.cycle[0, slot]
        number = stretch.counts[0, source] + period * stretch.counts[1, source] + stretch.cycle[1, slot]
        assert number == counts[source]
        if row % 997 == 0:
            assert course.counts(row) == counts
            assert course.row_of(int(source), int(number)) == row
        counts[source] += 1


@settings(max_examples=40, deadline=None)
@given(mixture=changing(), at=st.integers(0, 20_000))
def test_a_change_leaves_the_rows_before_it_alone(mixture: Mixture, at: int) -> None:
    before = Course(mixture, {"a": 10, "b": 10, "c": 10})
    after = Course(mixture.changed(at, {"b": 1.0}), {"a": 10, "b": 10, "c": 10})
    for row in {0, at // 3, at // 2, max(0, at - 1), at}:
        assert after.counts(row) == before.counts(row)
    assert after.counts(at + 700)[1] == after.counts(at)[1] + 700


@settings(max_examples=60, deadline=None)
@given(
    ends=st.tuples(*[st.lists(st.integers(0, 100), min_size=3, max_size=3)] * 2).filter(
        lambda e: any(e[0]) and any(e[1])
    ),
    periods=st.integers(1, 60),
    part=st.floats(0, 1.5),
)
def test_counts_follow_the_integral_of_weights_that_move(
    ends: tuple[list[int], list[int]], periods: int, part: float
) -> None:
    over = periods * PERIOD
    course = Course(Mixture.linear(*map(named, ends), over), dict.fromkeys("abc", 10))
    start, end = ([weight / sum(weights) for weight in weights] for weights in ends)
    row = int(part * over)
    inside = min(row, over)
    for count, first, last in zip(course.counts(row), start, end, strict=True):
        exact = inside * first + (last - first) * inside**2 / (2 * over) + (row - inside) * last
        # Within a step of the staircase the line is above and then below it; rounding, which is carried on as far as
        # the line goes; the credit rule; a row a period for a source of less.
        stair = abs(last - first) * PERIOD / (8 * periods)
        lifted = row / PERIOD if min(start + end) * PERIOD < 3 else 0
        assert abs(count - exact) <= stair + 4 + 3 * 3 + 3 * lifted + (row - inside) / PERIOD


def test_a_long_line_is_a_short_staircase() -> None:
    over = 10**11
    course = Course(Mixture.linear({"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 3.0}, over), {"a": 10, "b": 10})
    assert len(course._firsts) <= PIECES + 1
    assert course.counts(over)[0] == pytest.approx(over / 2, rel=1e-6)
    assert course.counts(over // 2)[0] == pytest.approx(over * (0.75 + 0.5) / 4, rel=1e-6)
    assert course.counts(2 * over)[1] - course.counts(over)[1] == pytest.approx(0.75 * over, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4000), min_size=2, max_size=4),
    epochs=st.lists(st.sampled_from([0.5, 1, 1.5, 3]), min_size=4, max_size=4),
    moving=st.booleans(),
)
def test_used_up_sources_leave_their_rows_to_the_others(sizes: list[int], epochs: list[float], moving: bool) -> None:
    rows = {name: size for name, size in zip(NAMES, sizes, strict=False)}
    most = {name: value for name, value in zip(rows, epochs, strict=False)}
    start = {name: number + 1.0 for number, name in enumerate(rows)}
    end = {name: len(rows) - number + 0.0 for number, name in enumerate(rows)}
    mixture = Mixture.linear(start, end, 9000, max_epochs=most) if moving else Mixture.constant(start, max_epochs=most)
    course = Course(mixture, rows)
    limits = [int(most[name] * size) for name, size in rows.items()]
    assert course.total == sum(limits)
    seen = [0] * len(rows)
    for source in sources(course, 0, course.total):
        seen[source] += 1
        assert seen[source] <= limits[source]
    assert seen == limits == course.counts(course.total) == course.counts(10**9)
    assert [course.row_of(source, limit) for source, limit in enumerate(limits)] == [None] * len(rows)


def test_a_source_without_limit_takes_all_rows_when_the_others_are_used_up() -> None:
    course = Course(Mixture.constant({"a": 1.0, "b": 1.0}, max_epochs={"a": 2}), {"a": 50, "b": 50})
    assert course.total is None
    assert course.counts(10_000) == [100, 9900]
    # Until then both give every other row: the 100th of `a` is row 198.
    assert course.row_of(0, 99) == 198
    assert sources(course, 199, 20) == [1] * 20


def test_epochs_allowed_later_are_read_later() -> None:
    mixture = Mixture.constant({"a": 1.0, "b": 1.0}, max_epochs={"a": 1})
    later = mixture.changed(1000, {"a": 1.0, "b": 1.0}, max_epochs={"a": 3})
    course = Course(later, {"a": 50, "b": 50})
    assert course.counts(1000) == [50, 950]
    assert course.counts(5000) == [150, 4850]


@settings(max_examples=50, deadline=None)
@given(mixture=changing(), at=st.integers(1, 50_000))
def test_json_says_all_and_continuing_unchanged_changes_nothing(mixture: Mixture, at: int) -> None:
    again = Mixture.from_json(json.loads(json.dumps(mixture.to_json())))
    assert again == mixture
    assert again.continued(10**9, Mixture(mixture.segments[-1:])) == mixture


def test_continuing_with_another_line_follows_that_line_from_there_on() -> None:
    first = Mixture.linear({"a": 7, "b": 3}, {"a": 3, "b": 7}, 100 * PERIOD)
    other = Mixture.linear({"a": 7, "b": 3}, {"a": 5, "b": 5}, 100 * PERIOD)
    course = Course(first.continued(50 * PERIOD, other), {"a": 10, "b": 10})
    assert course.counts(50 * PERIOD) == Course(first, {"a": 10, "b": 10}).counts(50 * PERIOD)
    # Half way along the other line `a` has 0.6 of the rows.
    assert course.counts(51 * PERIOD)[0] - course.counts(50 * PERIOD)[0] == pytest.approx(0.599 * PERIOD, abs=2)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "weights of the sources are"),
        ({"a": 0.0}, "one above 0"),
        ({"a": -1.0, "b": 2.0}, "0 or more each"),
        ({"a": float("nan")}, "0 or more each"),
        ({"a": float("inf")}, "0 or more each"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: dict[str, float], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Mixture.constant(weights)


def test_a_source_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match="names wki; the corpus has wiki, code"):
        Course(Mixture.constant({"wki": 1.0}), {"wiki": 3, "code": 4})


def test_too_many_sources_are_refused() -> None:
    rows = {str(number): 1 for number in range(PERIOD)}
    with pytest.raises(DataError, match="4096 sources cannot be mixed"):
        Course(Mixture.constant(dict.fromkeys(rows, 1.0)), rows)
