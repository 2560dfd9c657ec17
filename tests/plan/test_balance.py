"""Rows dealt by cost: every row once, as many for each rank, and the busiest rank has little more than the mean."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import UserError
from ropewalk.plan.config import Parallel
from ropewalk.plan.layout import laid_out
from ropewalk.plan.plan import Plan
from ropewalk.plan.sequence_assignment import deal, row_cost
from tests.tiny import small_spec


def busiest(costs: list[int], dealt: list[list[int]]) -> int:
    return max(sum(costs[row] for row in rows) for rows in dealt)


def as_loaded(rows: int, ranks: int) -> list[list[int]]:
    return [list(range(rank, rows, ranks)) for rank in range(ranks)]


def packed_pairs(draw: np.random.Generator, *, length: int, sigma: float) -> int:
    """Pairs of tokens that meet in a row that is filled with documents of lognormal length, the last one cut."""
    pairs = 0
    while length:
        document = min(length, 1 + int(draw.lognormal(6, sigma)))
        pairs += document * (document + 1) // 2
        length -= document
    return pairs


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int]:
    ranks, each = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    costs = draw(st.lists(st.integers(0, 1 << 40), min_size=ranks * each, max_size=ranks * each))
    return costs, ranks


@settings(max_examples=200, deadline=None)
@given(batches())
def test_every_row_is_dealt_once_and_no_rank_is_busier_than_before(case: tuple[list[int], int]) -> None:
    costs, ranks = case
    dealt = deal(costs, ranks)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(costs)))
    assert {len(rows) for rows in dealt} == {len(costs) // ranks}
    assert busiest(costs, dealt) <= busiest(costs, as_loaded(len(costs), ranks))
    assert all(costs[a] >= costs[b] for rows in dealt for a, b in pairwise(rows))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5).flatmap(lambda half: st.permutations(half * 2)))
def test_two_ranks_come_close_to_the_best_of_all_dealings(costs: list[int]) -> None:
    total, half = sum(costs), len(costs) // 2
    best = min(max(sum(chosen), total - sum(chosen)) for chosen in combinations(costs, half))
    # What Graham (1969) proves of dealing from the costliest down, for two: 4/3 - 1/6.
    assert busiest(costs, deal(costs, 2)) <= 7 / 6 * best


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("ranks", "each"), [(2, 16), (4, 8), (8, 8), (8, 32), (64, 8)])
def test_skewed_lengths_are_even_within_5_percent(ranks: int, each: int, seed: int) -> None:
    """Attention alone: what all tokens cost alike would only hide unevenness."""
    draw = np.random.default_rng(seed)
    costs = [packed_pairs(draw, length=4096, sigma=1.5) for _ in range(ranks * each)]
    mean = sum(costs) / ranks
    even, loaded = (busiest(costs, dealt) / mean for dealt in (deal(costs, ranks), as_loaded(len(costs), ranks)))
    assert even <= 1.05
    assert even < loaded


def test_rows_that_cost_the_same_stay_where_they_are() -> None:
    assert deal([7] * 12, 4) == as_loaded(12, 4)


@settings(max_examples=50, deadline=None)
@given(layers=st.integers(1, 5), length=st.integers(2, 64), window=st.sampled_from([None, 3]))
def test_a_row_of_one_document_costs_what_the_model_says(layers: int, length: int, window: int | None) -> None:
    spec = small_spec(layers=layers, sequence_length=length, window=window)
    cost = row_cost(spec)
    # The spec's number is rounded once a token, and so is ours.
    found = cost.pair * spec.attended_pairs() + cost.token * length
    assert found == pytest.approx(spec.flops_per_token("causal") * length, abs=length)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"exact": True, "balance": True, "shard": 2}, "`parallel.exact` does not work with `parallel.balance`"),
        ({"exact": True, "devices": 2}, "`parallel.exact` does not work with `parallel.devices`"),
        ({"devices": 2, "shard": 2}, "`parallel.devices` needs a single process"),
        ({"devices": 3}, "3 devices cannot share the 8 microbatches of a step evenly"),
        ({"devices": 2, "offload": ("optimizer",)}, "`parallel.devices` does not support offload"),
    ],
)
def test_what_does_not_go_together_is_refused(settings_: dict[str, object], message: str) -> None:
    plan = Plan(device="cpu", precision="fp32", batch_size=8, microbatch_size=1)
    with pytest.raises(UserError, match=message):
        laid_out(plan, Parallel(**settings_), small_spec(), processes=None)  # type: ignore[arg-type]
