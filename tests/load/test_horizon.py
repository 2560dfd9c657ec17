"""What is planned, under way and held: bounded, each item once, the earliest needed first."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.horizon import MOST_BATCHES, Horizon
from ropewalk.store.items import Item


def chunk(number: int, *, file: str = "a", size: int = 10) -> Item:
    return Item(file, number * size, (number + 1) * size)


def needs_of(seed: int, *, chunks: int, per_batch: int) -> list[list[Item]]:
    """Fifty batches of chunks of two files; near batches share some."""
    draw = random.Random(seed)
    return [
        [chunk(draw.randrange(chunks), file=draw.choice("ab"), size=10) for _ in range(draw.randint(0, per_batch))]
        for _ in range(50)
    ]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    chunks=st.integers(1, 40),
    most=st.integers(10, 300),
    joined=st.integers(10, 60),
    data=st.data(),
)
def test_plans_are_bounded_and_complete_under_any_arrival_and_seek(
    seed: int, chunks: int, most: int, joined: int, data: st.DataObject
) -> None:
    batches = needs_of(seed, chunks=chunks, per_batch=4)
    horizon: Horizon[str] = Horizon(batches.__getitem__)
    under_way: list[Item] = []
    batch = 0
    for _ in range(80):
        horizon.plan(most)
        assert horizon.bytes <= most or horizon.batches == 1 or under_way
        action = data.draw(st.sampled_from(["request", "request", "arrive", "take", "take", "seek"]))
        if action == "request":
            asked = horizon.request(most_bytes=joined, gap_bytes=10)
            assert not set(asked) & set(under_way), "asked for twice"
            assert len({item.file for item in asked}) <= 1
            assert not asked or asked[-1].stop - asked[0].start <= max(joined, 10)
            under_way += asked
        elif action == "arrive" and under_way:
            item = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            horizon.arrived(item, f"{item.file}{item.start}")
        elif action == "take" and horizon.ready(batch) and batch < 50:
            assert horizon.check(batch) == {item: f"{item.file}{item.start}" for item in batches[batch]}
            horizon.release(batch)
            batch += 1
        elif action == "seek":
            batch = data.draw(st.integers(0, 49))
            horizon.seek(batch, most_bytes=most)
    # Whatever happened, the rest can be read, and nothing is left over.
    while batch < 50:
        horizon.plan(most)
        under_way += horizon.request(most_bytes=joined, gap_bytes=10)
        while under_way:
            item = under_way.pop()
            horizon.arrived(item, f"{item.file}{item.start}")
        if horizon.ready(batch):
            horizon.release(batch)
            batch += 1
    for item in under_way:
        horizon.arrived(item, "late")
    assert horizon.bytes == horizon.held_bytes == 0


def test_the_item_needed_first_is_asked_for_first_with_its_neighbours() -> None:
    batches = [[chunk(7)], [chunk(3), chunk(8)], [chunk(4), chunk(9), chunk(20)]]
    horizon: Horizon[str] = Horizon(batches.__getitem__)
    horizon.plan(1000)
    assert horizon.request(most_bytes=30, gap_bytes=0) == [chunk(7), chunk(8), chunk(9)]
    assert horizon.request(most_bytes=30, gap_bytes=0) == [chunk(3), chunk(4)]
    assert horizon.request(most_bytes=30, gap_bytes=0) == [chunk(20)]
    assert horizon.request(most_bytes=30, gap_bytes=0) == []


def test_what_two_near_batches_share_is_asked_for_once() -> None:
    horizon: Horizon[str] = Horizon([[chunk(1)], [chunk(2)], [chunk(1)]].__getitem__)
    horizon.plan(30)
    asked = horizon.request(most_bytes=10, gap_bytes=0) + horizon.request(most_bytes=10, gap_bytes=0)
    for item in asked:
        horizon.arrived(item, "x")
    for batch in range(3):
        assert horizon.ready(batch)
        horizon.release(batch)
    assert asked == [chunk(1), chunk(2)]


def test_what_is_released_is_forgotten_also_when_it_arrives_late() -> None:
    horizon: Horizon[str] = Horizon([[chunk(1)], [chunk(9)]].__getitem__)
    horizon.plan(30)
    early, late = (horizon.request(most_bytes=10, gap_bytes=0)[0] for _ in range(2))
    assert [horizon.wanted_for(early), horizon.wanted_for(late)] == [0, 1]
    horizon.arrived(early, "x")
    horizon.release_before(2)
    assert horizon.wanted_for(late) == 1, "it is still under way"
    horizon.arrived(late, "x")
    for item in (early, late):
        with pytest.raises(KeyError):
            horizon.wanted_for(item)


def test_a_corpus_that_fits_the_bytes_is_not_planned_without_end() -> None:
    horizon: Horizon[str] = Horizon(lambda batch: [chunk(batch % 3)])
    for _ in range(200):
        horizon.plan(1000)
    assert horizon.batches == MOST_BATCHES


def test_a_failure_is_told_by_the_batch_that_needs_it_and_then_asked_for_again() -> None:
    horizon: Horizon[str] = Horizon([[chunk(0)], [chunk(5)]].__getitem__)
    horizon.plan(100)
    for item in (*horizon.request(most_bytes=10, gap_bytes=0), *horizon.request(most_bytes=10, gap_bytes=0)):
        horizon.arrived(item, OSError("gone") if item == chunk(5) else "x")
    assert horizon.check(0) == {chunk(0): "x"}
    with pytest.raises(OSError, match="gone"):
        horizon.check(1)
    assert not horizon.ready(1)
    assert horizon.request(most_bytes=10, gap_bytes=0) == [chunk(5)]


def test_a_seek_keeps_what_is_at_hand_and_under_way_and_needed_there() -> None:
    horizon: Horizon[str] = Horizon(lambda batch: [chunk(batch), chunk(batch + 1)])
    horizon.plan(60)
    held, under_way = (horizon.request(most_bytes=10, gap_bytes=0)[0] for _ in range(2))
    horizon.arrived(held, "x")
    horizon.seek(1, most_bytes=30)
    assert (held, under_way) == (chunk(0), chunk(1))
    assert horizon.request(most_bytes=10, gap_bytes=0) == [chunk(2)], "chunk 1 is under way, chunk 0 not needed"


def stalls(*, budget: int, rate: float, step_s: float, steps: int = 400, lanes: int = 4) -> list[float]:
    """How long each step waits, by a simulation in virtual time: `lanes` requests at once share a store that delivers
    10 bytes in 1/`rate` seconds on average over the lanes, exponentially distributed, with 2 s of silence now and then.
    """
    draw = random.Random(1)
    horizon: Horizon[str] = Horizon(lambda batch: [chunk(batch)])
    arrivals: list[tuple[float, int, Item]] = []
    now, count, waits = 0.0, 0, []

    def issue() -> None:
        nonlocal count
        horizon.plan(budget)
        while len(arrivals) < lanes and (asked := horizon.request(most_bytes=10, gap_bytes=0)):
            count += 1
            silence = 2.0 if count % 100 == 50 else 0.0
            heapq.heappush(arrivals, (now + draw.expovariate(rate / lanes) + silence, count, asked[0]))

    for step in range(steps):
        began = now
        issue()
        while not horizon.ready(step):
            now, _, item = heapq.heappop(arrivals)
            horizon.arrived(item, "x")
            issue()
        waits.append(now - began)
        horizon.release(step)
        computed = now + step_s
        issue()
        while arrivals and arrivals[0][0] <= computed:
            now, _, item = heapq.heappop(arrivals)
            horizon.arrived(item, "x")
            issue()
        now = computed
    return waits


def test_steps_never_wait_after_the_first_when_the_mean_bandwidth_suffices() -> None:
    # 12 chunks a second are read and 20 delivered: silences of 2 s need 24 chunks at hand, 60 are allowed.
    waits = stalls(budget=600, rate=20.0, step_s=1 / 12)
    assert sum(waits[10:]) == 0.0


def test_steps_wait_as_long_as_the_store_lacks_when_it_does_not_suffice() -> None:
    waits = stalls(budget=600, rate=10.0, step_s=1 / 12)
    assert sum(waits) == pytest.approx(400 / 10 + 8 / 4 - 400 / 12, rel=0.3)
