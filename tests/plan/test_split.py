"""Layers on pipeline stages: the slowest stage is as quick as any split makes it."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import UserError
from ropewalk.plan.stage_split import layer_costs, resplit, split_layers, stage_costs, stage_times
from tests.tiny import small_spec


def sums(costs: list[float], split: tuple[tuple[int, ...], ...]) -> list[float]:
    """What each stage costs, added up one by one."""
    stages = [[costs[layer + 1] for layer in layers] for layers in split]
    stages[0].append(costs[0])
    stages[-1].append(costs[-1])
    return [sum(stage) for stage in stages]


def all_splits(layers: int, stages: int) -> list[tuple[tuple[int, ...], ...]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [tuple(tuple(range(a, b)) for a, b in pairwise((0, *inner, layers))) for inner in cuts]


def merit(times: list[float], split: tuple[tuple[int, ...], ...]) -> tuple[float, float, list[int]]:
    """What makes one split better than another, most important first."""
    return max(times), sum(time * time for time in times), [len(layers) for layers in split]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], list[int]]:
    """Stages, costs and slowness, in whole numbers: sums of them are exact."""
    layers = draw(st.integers(1, 8))
    stages = draw(st.integers(1, layers))
    costs = draw(st.lists(st.integers(0, 9), min_size=layers + 2, max_size=layers + 2))
    return stages, costs, draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_no_split_is_better(case: tuple[int, list[int], list[int]]) -> None:
    stages, costs, slowness = case
    spec = small_spec(layers=len(costs) - 2)

    def merit_of(split: tuple[tuple[int, ...], ...]) -> tuple[float, float, list[int]]:
        times = [slow * cost for slow, cost in zip(slowness, sums(costs, split), strict=True)]
        return merit(times, split)

    found = split_layers(spec, stages, costs=costs, slowness=slowness)
    assert found == min(all_splits(spec.layers, stages), key=merit_of)
    assert list(stage_costs(costs, found)) == sums(costs, found)


@settings(max_examples=50, deadline=None)
@given(layers=st.integers(1, 6), vocabulary=st.integers(50, 5000), window=st.sampled_from([None, 4]))
def test_the_costs_of_the_parts_are_those_of_the_model(layers: int, vocabulary: int, window: int | None) -> None:
    spec = small_spec(layers=layers, vocabulary=vocabulary, window=window)
    embedding, *rest = layer_costs(spec)
    assert sum(rest) == pytest.approx(spec.flops_per_token("causal"), abs=layers)
    assert embedding < 0.001 * sum(rest)


def test_the_times_of_the_stages_add_up_to_the_model() -> None:
    spec = small_spec(layers=5, vocabulary=600)
    split = split_layers(spec, 3)
    times = stage_times(spec, split)
    assert tuple(time.forward + time.backward for time in times) == stage_costs(layer_costs(spec), split)
    # A backward pass has two products for each of the forward pass, and scores have no weights.
    assert sum(time.backward for time in times) == 2 * sum(time.forward for time in times) + spec.width
    assert sum(time.forward - time.weight for time in times) == spec.layers * 4 * 16 * 6.5 - spec.width


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    small, large = (small_spec(layers=8, vocabulary=vocabulary) for vocabulary in (61, 600))
    assert [len(layers) for layers in split_layers(small, 2)] == [4, 4]
    costs = layer_costs(large)
    head_in_layers = costs[-1] / costs[1]
    first, last = (len(layers) for layers in split_layers(large, 2))
    assert first - last == pytest.approx(head_in_layers, abs=1)
    assert first > last


def test_layers_that_do_not_divide_go_where_the_fewest_microbatches_live() -> None:
    spec = small_spec(layers=6)
    assert split_layers(spec, 4, costs=[0, *[1] * 6, 0]) == ((0,), (1,), (2, 3), (4, 5))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"4 pipeline stages .* cannot share 3 layers; take at most 3"):
        split_layers(small_spec(layers=3), 4)


def test_a_rank_at_half_speed_gets_half_the_layers() -> None:
    spec = small_spec(layers=10)
    now = split_layers(spec, 2)
    cost = layer_costs(spec)[1]
    seconds = [len(layers) * cost * slow for layers, slow in zip(now, (1.0, 2.0), strict=True)]
    assert [len(layers) for layers in resplit(spec, now, seconds=seconds)] == [7, 3]


def test_a_small_gain_moves_nothing() -> None:
    spec = small_spec(layers=10)
    now = ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    assert resplit(spec, now, seconds=[1.0, 1.05]) == now


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=3, max_size=3), st.sampled_from(all_splits(9, 3)))
def test_a_second_measurement_of_the_same_ranks_changes_nothing(
    slowness: list[int], start: tuple[tuple[int, ...], ...]
) -> None:
    spec = small_spec(layers=9)

    def measured(split: tuple[tuple[int, ...], ...]) -> list[float]:
        return [slow * cost for slow, cost in zip(slowness, stage_costs(layer_costs(spec), split), strict=True)]

    better = resplit(spec, start, seconds=measured(start))
    assert max(measured(better)) <= max(measured(start))
    assert resplit(spec, better, seconds=measured(better)) == better
