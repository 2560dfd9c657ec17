"""The Bloom filter: repeats are always known, and first occurrences are lost no more often than stated."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.prepare.bloom import BloomFilter, design, rate
from ropewalk.prepare.config import Bloom


def hashes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**64 - 1), max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_repeats_are_known_and_batches_do_not_matter(items: list[int], edges: list[int]) -> None:
    column = np.array(items, np.uint64)
    whole = BloomFilter(Bloom()).insert(column)
    pieces = BloomFilter(Bloom())
    cut = [pieces.insert(piece) for piece in np.split(column, sorted(edges))]
    assert np.concatenate(cut).tolist() == whole.tolist()
    # At 60 of ten million items a false positive is out of the question: the answer is that of a set.
    assert whole.tolist() == [item not in items[:place] for place, item in enumerate(items)]
    assert pieces.new == len(set(items))


@pytest.mark.parametrize("stated", [0.1, 0.01, 0.001])
def test_the_measured_rate_of_a_full_filter_is_the_stated_one(stated: float) -> None:
    items = 200_000
    bloom = BloomFilter(Bloom(expected_items=items, false_positive_rate=stated))
    # Fill until as many are in it as it is made for.
    number = 0
    while bloom.new < items:
        bloom.insert(hashes(number, min(items - bloom.new, items // 4)))
        number += 1
    assert bloom.false_positives == pytest.approx(stated, rel=0.03)
    lost = asked = 0
    # Few at a time: asking inserts.
    probe = BloomFilter(Bloom(expected_items=items, false_positive_rate=stated))
    for seed in range(40):
        probe._table[:] = bloom._table
        lost += int((~probe.insert(hashes(1000 + seed, 1000))).sum())
        asked += 1000
    # Asking 1000 of 200,000 raises the rate by a few percent; five standard deviations of the count on top.
    assert lost == pytest.approx(asked * stated, abs=0.05 * asked * stated + 5 * math.sqrt(asked * stated))


def test_a_filter_says_how_its_rate_grows_beyond_what_it_is_made_for() -> None:
    bloom = BloomFilter(Bloom(expected_items=1000, false_positive_rate=1e-4))
    bloom.insert(hashes(1, 500))
    assert bloom.false_positives < 1e-5
    bloom.insert(hashes(2, 1500))
    assert bloom.false_positives > 1e-3


@pytest.mark.parametrize("stated", [0.1, 1e-3, 1e-6, 1e-9, 1e-12])
def test_the_design_holds_the_rate_and_a_smaller_one_does_not(stated: float) -> None:
    bits, probes = design(stated)
    assert rate(bits, probes) <= stated
    assert all(rate(bits * 0.98, other) > stated for other in range(1, 25))
    # A classic filter needs log2(1/rate) / ln 2 bits; blocks cost more the smaller the rate.
    assert 1 <= bits / (math.log2(1 / stated) / math.log(2)) < 2.8


def test_the_stated_memory_is_what_an_item_takes() -> None:
    assert BloomFilter(Bloom(expected_items=100_000, false_positive_rate=1e-6)).memory_bytes / 100_000 == pytest.approx(
        4.8, abs=0.05
    )
