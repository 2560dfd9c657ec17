"""Plans of recomputation: within the budget, with the fewest layers, learned from what was counted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.model.activations import BlockBytes, Division, saved_bytes, saved_logit_bytes
from ropewalk.plan.recompute_planner import Estimator, Foreseen, Planner, bucket_length, fewest, foresee
from tests.model.specs import small, specs

blocks = st.builds(BlockBytes, st.integers(0, 10), st.integers(0, 40))
passes = st.builds(
    lambda found, rest: Foreseen(blocks=dict(enumerate(found)), rest=rest),
    st.lists(blocks, min_size=1, max_size=7),
    st.integers(0, 20),
)
sizes = st.tuples(st.integers(1, 8), st.integers(1, 300))
counts = st.tuples(st.integers(0, 6), sizes, st.integers(0, 50_000))


def subsets(foreseen: Foreseen) -> Iterator[tuple[int, ...]]:
    for count in range(len(foreseen.blocks) + 1):
        yield from itertools.combinations(foreseen.blocks, count)


def peak_by_hand(foreseen: Foreseen, again: tuple[int, ...]) -> int:
    """The fullest moment of a forward and backward pass, played block by block."""
    alive = most = foreseen.rest
    for layer, block in foreseen.blocks.items():
        alive += block.input + (0 if layer in again else block.inner)
        most = max(most, alive)
    for layer, block in reversed(foreseen.blocks.items()):
        alive += block.inner if layer in again else 0
        most = max(most, alive)
        alive -= block.input + block.inner
    assert alive == foreseen.rest
    return most


@settings(deadline=None)
@given(passes)
def test_the_peak_is_that_of_a_pass_played_block_by_block(foreseen):
    assert all(foreseen.peak(again) == peak_by_hand(foreseen, again) for again in subsets(foreseen))


@settings(max_examples=300, deadline=None)
@given(passes, st.integers(0, 300))
def test_a_plan_fits_whenever_one_does_and_has_the_fewest_layers(foreseen, budget):
    chosen = fewest(foreseen, budget)
    peaks = {again: peak_by_hand(foreseen, again) for again in subsets(foreseen)}
    fitting = [again for again, peak in peaks.items() if peak <= budget]
    if fitting:
        assert foreseen.peak(chosen) <= budget
        assert len(chosen) == min(map(len, fitting))
    else:
        assert foreseen.peak(chosen) == min(peaks.values())


@settings(deadline=None)
@given(passes, st.integers(0, 300), st.integers(0, 100))
def test_more_memory_never_asks_for_more_layers(foreseen, budget, more):
    if foreseen.peak(foreseen.blocks) <= budget:
        assert len(fewest(foreseen, budget + more)) <= len(fewest(foreseen, budget))


def test_equal_layers_are_computed_again_from_the_lowest() -> None:
    foreseen = Foreseen(blocks={layer: BlockBytes(1, 10) for layer in range(6)}, rest=5)
    found = [sorted(fewest(foreseen, budget)) for budget in (71, 70, 61, 60, 51, 21, 20, 0)]
    lowest = list(range(5))
    assert found == [[], [0], [0], [0, 1], [0, 1], lowest, lowest, lowest]
    assert found[-1] == lowest, "the last layer comes back at once: to compute it again gains nothing"


def planner_for(budget: int, prior: Foreseen, **settings: int) -> Planner:
    """Of a prior that grows with the square of the length."""

    def grown(rows: int, length: int) -> Foreseen:
        tokens = rows * length
        found = {k: BlockBytes(b.input * tokens, b.inner * tokens + length) for k, b in prior.blocks.items()}
        return Foreseen(blocks=found, rest=prior.rest * tokens)

    return Planner(budget, Estimator(grown), **settings)


@settings(deadline=None)
@given(passes, st.integers(0, 100_000), st.lists(counts, max_size=5), sizes)
def test_a_plan_that_was_kept_is_a_fresh_one(foreseen, budget, seen, size):
    used, fresh = planner_for(budget, foreseen), planner_for(budget, foreseen)
    used.plan_for(*size)
    for layer, counted, inner in seen:
        used.observe(layer, *counted, inner)
        used.plan_for(*counted)
        fresh.observe(layer, *counted, inner)
    assert used.plan_for(*size) == used.plan_for(*size) == fresh.plan_for(*size)


@settings(deadline=None)
@given(passes, st.integers(0, 100_000), sizes)
def test_sizes_of_a_bucket_share_a_plan_that_fits_all_of_them(foreseen, budget, size):
    rows, length = size
    planner = planner_for(budget, foreseen)
    last = bucket_length(length)
    assert length <= last <= max(length + 1, 1.125 * length)
    assert planner.plan_for(rows, length) == planner.plan_for(rows, last)
    if planner.planned_bytes(rows, length) <= budget:
        assert planner.estimator.estimate(rows, length).peak(planner.plan_for(rows, length)) <= budget


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_buckets_are_in_order(one, other):
    assert bucket_length(bucket_length(one)) == bucket_length(one)
    assert (bucket_length(one) <= bucket_length(other)) or one > other


coefficients = st.tuples(st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 100))


@settings(deadline=None)
@given(coefficients, st.integers(0, 5000), sizes)
def test_three_counts_determine_any_quadratic_function_of_the_length(true, prior_a_token, size):
    def prior(rows: int, length: int) -> Foreseen:
        return Foreseen(blocks={0: BlockBytes(0, prior_a_token * rows * length)}, rest=0)

    def quadratic(rows: int, length: int) -> int:
        return true[0] + true[1] * rows * length + true[2] * rows * length**2

    estimator = Estimator(prior)
    for rows, length in ((1, 16), (2, 128), (1, 256)):
        estimator.observe(0, rows, length, quadratic(rows, length))
    assert estimator.estimate(*size).blocks[0].inner == pytest.approx(quadratic(*size), rel=1e-6, abs=1)


@settings(deadline=None)
@given(sizes, st.integers(0, 10**6), sizes)
def test_a_count_is_believed_and_one_that_agrees_with_the_prior_changes_nothing(size, counted, other):
    def prior(rows: int, length: int) -> Foreseen:
        return Foreseen(blocks={3: BlockBytes(1, 7 * rows * length)}, rest=0)

    estimator = Estimator(prior)
    estimator.observe(3, *size, 7 * size[0] * size[1])
    assert estimator.estimate(*other) == prior(*other)
    estimator.observe(3, *size, counted)
    assert estimator.estimate(*size).blocks[3].inner == counted


def test_counts_stop_when_the_fit_is_trusted() -> None:
    planner = planner_for(10**9, Foreseen(blocks={0: BlockBytes(1, 1)}, rest=0), sizes_counted=3)
    wanted = []
    for length in (10, 10, 20, 30, 40, 10):
        wanted.append(planner.wants(0, 1, length))
        if wanted[-1]:
            planner.observe(0, 1, length, 5 * length)
    assert wanted == [True, False, True, True, False, False]


@settings(deadline=None)
@given(passes, st.integers(0, 100_000), sizes, st.integers(0, 5000), st.integers(0, 3), st.integers(0, 100))
def test_a_plan_that_was_too_large_is_made_stricter_for_its_size_and_larger_ones(
    foreseen, budget, size, excess, more_rows, longer
):
    planner, untouched = planner_for(budget, foreseen), planner_for(budget, foreseen)
    before = planner.planned_bytes(*size)
    least = planner.estimator.estimate(size[0], bucket_length(size[1])).peak(foreseen.blocks)
    stricter = planner.tighten(*size, excess_bytes=excess)
    after = planner.planned_bytes(*size)
    assert stricter == (after < before) == (least < before)
    assert after <= max(least, before - max(1, excess))
    larger = size[0] + more_rows, size[1] + longer
    assert planner.planned_bytes(*larger) <= untouched.planned_bytes(*larger)
    if size[1] > 1:
        smaller = size[0], bucket_length(size[1]) // 2
        assert planner.plan_for(*smaller) == untouched.plan_for(*smaller)


@settings(max_examples=50, deadline=None)
@given(specs(least_length=4), st.integers(1, 4), st.sampled_from(["fp32", "bf16"]))
def test_what_is_foreseen_adds_up_to_the_count_of_the_spec(spec, rows, precision):
    foreseen = foresee(spec, rows=rows, length=spec.sequence_length, precision=precision)
    logits = saved_logit_bytes(spec, tokens=rows * spec.sequence_length)
    count = saved_bytes(spec, rows=rows, precision=precision)
    everything = foreseen.peak(()) - 2 * logits
    # Blocks that are not computed again may need narrow copies of their input and of rotations in place of both.
    spare = 4 * rows * spec.sequence_length * (spec.layers * spec.width + spec.head_size)
    assert count <= everything <= count + spare


def test_ranks_that_share_a_row_foresee_their_share() -> None:
    spec = small(layers=2, sequence_length=64, heads=4, kv_heads=4, mlp_width=64)

    def inner(division: Division) -> int:
        return foresee(spec, rows=2, length=64, precision="fp32", division=division).blocks[0].inner

    whole, halves = inner(Division()), inner(Division(tensor=2, sequence=True))
    assert inner(Division(context=2)) == whole // 2
    assert whole / 2 < halves < inner(Division(tensor=2)) < whole


def test_a_stage_foresees_its_own_layers() -> None:
    spec = small(layers=4)
    whole, middle = (
        foresee(spec, rows=2, length=10, precision="fp32", layers=layers, last=layers is None)
        for layers in (None, (1, 2))
    )
    assert middle.blocks == {layer: whole.blocks[layer] for layer in (1, 2)}
    assert whole.rest - middle.rest == 2 * saved_logit_bytes(spec, tokens=20)
    assert fewest(middle, 0) == {1}
