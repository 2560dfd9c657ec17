"""The order of the data: a keyed permutation, mixed in fixed shares, a pure function of the index."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.load.order import PERIOD, Order, permuted


def all_of(size: int, key: int) -> list[int]:
    return permuted(np.arange(size, dtype=np.uint64), size, key).tolist()


@pytest.mark.parametrize("key", [0, 1, 2**63 - 1])
def test_every_size_up_to_300_is_permuted_one_to_one(key: int) -> None:
    assert [size for size in range(1, 301) if sorted(all_of(size, key)) != list(range(size))] == []


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 2000), key=st.integers(0, 2**63 - 1))
def test_any_key_permutes_one_to_one(size: int, key: int) -> None:
    assert sorted(all_of(size, key)) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 5, 7, 12, 16, 33])
def test_every_index_goes_to_every_place_equally_often(size: int) -> None:
    keys = 2000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), all_of(size, key)] += 1
    expected = keys / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    # Five deviations of the chi-square distribution above its mean: one failure in a million for a fair shuffle.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_no_index_keeps_its_place_under_all_keys() -> None:
    places = {index: {all_of(1000, key)[index] for key in range(20)} for index in (0, 1, 999)}
    assert [index for index, seen in places.items() if len(seen) < 15] == []


def test_a_huge_permutation_takes_no_memory() -> None:
    tracemalloc.start()
    result = permuted(np.array([0, 1, 2**40], np.uint64), 2**45 + 12345, key=5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (result < 2**45 + 12345).all()
    assert peak < 100_000


@settings(max_examples=20, deadline=None)
@given(windows=st.lists(st.integers(1, 300), min_size=1, max_size=4), seed=st.integers(0, 2**31))
def test_an_epoch_reads_every_window_of_a_source_once(windows: list[int], seed: int) -> None:
    order = Order(windows, [1.0] * len(windows), seed=seed)
    read: dict[tuple[int, int], list[int]] = {}
    for row in order.rows(0, 3 * PERIOD):
        read.setdefault((row.source, row.epoch), []).append(row.window)
    for (source, epoch), seen in read.items():
        whole = (source, epoch + 1) in read
        assert len(set(seen)) == len(seen)
        assert not whole or sorted(seen) == list(range(windows[source]))


def test_epochs_differ_in_their_order() -> None:
    rows = Order([100], [1.0], seed=0).rows(0, 200)
    first, second = ([row.window for row in rows if row.epoch == epoch] for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second


def test_seeds_differ_in_their_order() -> None:
    orders = {tuple(row.window for row in Order([100], [1.0], seed=seed).rows(0, 50)) for seed in range(20)}
    assert len(orders) == 20


@settings(max_examples=50, deadline=None)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=10), period=st.integers(0, 50))
def test_shares_of_a_period_meet_the_weights_to_one_row(weights: list[float], period: int) -> None:
    order = Order([50] * len(weights), weights, seed=1)
    counts = Counter(row.source for row in order.rows(period * PERIOD, PERIOD))
    exact = [weight / sum(weights) * PERIOD for weight in weights]
    # A source too small for one row gets one all the same, at the cost of the largest.
    lifted = sum(max(0.0, 1 - value) for value in exact)
    assert all(abs(counts[source] - value) <= 1 + lifted for source, value in enumerate(exact))
    assert len(counts) == len(weights)


def test_a_source_of_hardly_any_weight_still_gets_a_row_a_period() -> None:
    order = Order([10, 10, 10], [1.0, 1e-9, 1e-300], seed=0)
    assert Counter(row.source for row in order.rows(0, PERIOD)) == {0: PERIOD - 2, 1: 1, 2: 1}


def test_a_row_depends_on_its_index_alone() -> None:
    windows, weights = [40, 7, 3], [3.0, 1.0, 0.2]
    forward = Order(windows, weights, seed=9).rows(0, 6000)
    order = Order(windows, weights, seed=9)
    indices = np.random.default_rng(0).permutation(6000)[:500].tolist()
    assert [order.row(index) for index in indices] == [forward[index] for index in indices]
    assert order.rows(100, 50, stride=7) == forward[100 : 100 + 350 : 7]


def test_epochs_count_how_often_each_source_was_read() -> None:
    order = Order([64, 512], [1.0, 1.0], seed=0)
    assert order.epochs(2 * PERIOD) == [16.0, 2.0]
    assert max(row.epoch for row in order.rows(0, 2 * PERIOD) if row.source == 0) == 15


@pytest.mark.parametrize(
    ("windows", "weights", "words"),
    [
        ([5, 0], [1.0, 1.0], "source 1 has not one row"),
        ([], [], "0 sources cannot be mixed"),
        ([1] * 1025, [1.0] * 1025, "1025 sources cannot be mixed"),
        ([5, 5], [1.0, 0.0], "each must be above 0"),
        ([5, 5], [1.0, float("nan")], "each must be above 0"),
    ],
)
def test_what_cannot_be_mixed_is_refused(windows: list[int], weights: list[float], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Order(windows, weights, seed=0)
