"""Hit counts against exhaustive search, the tiers themselves and the published shape."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.load.cache.policies import Keep, Lru, Policy
from ropewalk.load.cache.ram import Ram
from ropewalk.load.cache.simulate import (
    EpochHits,
    Rule,
    epochs_in_random_order,
    hit_rate,
    hits,
    hits_per_epoch,
    lru_hits,
    page_cache,
)
from ropewalk.store.items import Item

from .origins import Counting


def best(accesses: tuple[int, ...], capacity: int) -> int:
    """The most hits that any sequence of decisions gives: every choice tried."""

    @functools.cache
    def search(place: int, held: frozenset[int]) -> int:
        if place == len(accesses):
            return 0
        item = accesses[place]
        if item in held:
            return 1 + search(place + 1, held)
        choices = [held]
        if capacity:
            grown = held | {item}
            choices += [grown] if len(grown) <= capacity else [grown - {old} for old in held]
        return max(search(place + 1, choice) for choice in choices)

    return search(0, frozenset())


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(0, 4))
def test_belady_is_the_most_that_any_choice_gives(accesses: list[int], capacity: int) -> None:
    array = np.array(accesses, np.int64)
    assert hits(array, capacity=capacity, rule="belady").sum() == best(tuple(accesses), capacity)


@pytest.mark.parametrize(("rule", "policy"), [("keep", Keep), ("lru", Lru)])
def test_the_simulated_hits_are_those_of_the_tier(rule: Rule, policy: type[Keep | Lru]) -> None:
    accesses = epochs_in_random_order(40, epochs=4, seed=3)
    made: Policy = policy()
    ram = Ram(Counting(), budget_bytes=15 * 10, policy=made)
    for number in accesses.tolist():
        ram.fetch([Item("f", number * 10, number * 10 + 10)])
    assert ram.counts().hits == hits(accesses, capacity=15, rule=rule).sum()


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_fill_once_has_the_hits_of_belady_on_random_epochs_and_lru_has_not(share: float) -> None:
    keep, lru, bound = (hit_rate(share, rule=rule) for rule in ("keep", "lru", "belady"))
    assert keep == pytest.approx(bound, rel=0.01)
    assert keep == pytest.approx(share, abs=1e-9)
    # Between two uses at places x and y of two epochs (as shares), 1 - x (1 - y) of the items come; LRU hits when that
    # is less than it holds: P(x z > a) = 1 - a + a ln a for uniform x and z, with a = 1 - share.
    absent = 1 - share
    assert lru == pytest.approx(1 - absent + absent * np.log(absent), abs=0.015)


@given(st.floats(0.0, 1.0))
def test_the_formula_of_lru_lies_between_nothing_and_what_is_held(share: float) -> None:
    assert 0.0 <= lru_hits(share) <= share


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_formula_of_lru_is_what_its_simulation_gives(share: float) -> None:
    assert lru_hits(share) == pytest.approx(hit_rate(share, rule="lru", items=4000, epochs=8), abs=0.01)


@pytest.mark.parametrize("gigabytes", [0.5, 8, 64])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_the_page_cache_of_random_epochs_falls_short_of_keeping_what_came_first(gigabytes: float, share: float) -> None:
    memory = gigabytes * (1 << 30)
    found = hits_per_epoch(memory_bytes=memory, data_bytes=memory / share)
    assert found.keep == pytest.approx(share)
    assert found.lru - 0.01 < found.page_cache < 0.9 * found.keep


def test_data_that_fit_are_read_from_memory_whatever_the_policy() -> None:
    assert hits_per_epoch(memory_bytes=2e9, data_bytes=1e9) == EpochHits(page_cache=1.0, lru=1.0, keep=1.0)
    assert hits_per_epoch(memory_bytes=0, data_bytes=1e9) == EpochHits(page_cache=0.0, lru=0.0, keep=0.0)


def test_the_page_cache_promotes_what_is_read_again_and_keeps_it_from_a_scan() -> None:
    # Items 0 and 1 are read twice; then others come once: LRU would have dropped both.
    accesses = np.array([0, 1, 0, 1, *range(10, 16), 0, 1], np.int64)
    assert page_cache(accesses, 4, 10)[-2:].tolist() == [True, True]
    assert hits(accesses, capacity=4, rule="lru")[-2:].tolist() == [False, False]
