"""The forecast against a discrete-event simulation that knows nothing of its formula."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.forecast import (
    MEDIUMS,
    Rates,
    Setup,
    Stage,
    cache_hits,
    compressed,
    forecast,
    on_medium,
)

ITEMS = 16
"""Items of a batch, each in the cache or not."""


@dataclass(frozen=True)
class Plant:
    """A run whose delays are injected: mean seconds of a batch in each stage, their jitter, and its choices."""

    compute: float
    fetch: float
    """All items from the store, one request after the other."""
    cached: float
    """All items from the cache."""
    prepare: float
    copy: float
    jitter: float
    """Coefficient of variation of every drawn time."""
    hits: float = 0.0
    threads: int = 1
    requests: int = 1
    ahead: int = 2
    joined: bool = False


def times(plant: Plant, batches: int, seed: int) -> list[tuple[float, ...]]:
    """Seconds of each batch in fetch, prepare, copy and compute."""
    draw = np.random.default_rng(seed)
    shape = 1.0 / max(plant.jitter, 1e-6) ** 2

    def drawn(mean: float, parts: npt.NDArray[np.int64] | int = 1) -> npt.NDArray[np.float64]:
        # The sum of `parts` gamma variates is one of as many times the shape.
        shapes = np.maximum(np.broadcast_to(shape * np.asarray(parts), batches), 1e-300)
        return draw.gamma(shapes) * mean / shape

    hits = draw.binomial(ITEMS, plant.hits, batches)
    requests = 1 if plant.joined else plant.requests
    fetch = drawn(plant.cached / ITEMS, hits) + drawn(plant.fetch / ITEMS / requests, ITEMS - hits)
    columns = [fetch, *map(drawn, (plant.prepare, plant.copy, plant.compute))]
    return [tuple(row) for row in np.stack(columns, axis=1).tolist()]


def intervals(plant: Plant, *, batches: int = 1000, seed: int = 0) -> list[float]:
    """Seconds between the ends of the steps, by simulating every queue in the order of events."""
    workers = [0.0] * plant.threads
    store = copier = done = 0.0
    ends = [0.0]
    for number, (fetch, prepare, copy, compute) in enumerate(times(plant, batches, seed)):
        begun = ends[max(0, number - plant.ahead)]
        if plant.joined:
            prepared = max(begun, heapq.heappop(workers)) + fetch + prepare
        else:
            store = max(begun, store) + fetch
            prepared = max(store, heapq.heappop(workers)) + prepare
        heapq.heappush(workers, prepared)
        copier = max(copier, prepared) + copy
        done = max(copier, done) + compute
        ends.append(done)
    return [after - before for before, after in itertools.pairwise(ends)]


def speed(plant: Plant) -> float:
    """Batches a second once the pipeline is full."""
    settled = intervals(plant)[100:]
    return len(settled) / sum(settled)


def measured(plant: Plant, *, batches: int = 200) -> Rates:
    """The rates as a differential measurement finds them: the step alone, warm data, cold data, one thread of each."""
    alone = dataclasses.replace(plant, threads=1, requests=1, ahead=1, joined=True)
    step = intervals(dataclasses.replace(alone, fetch=0, cached=0, prepare=0, copy=0), batches=batches, seed=1)
    warm = intervals(dataclasses.replace(alone, hits=1.0, compute=0, copy=0), batches=batches, seed=2)
    cold = intervals(dataclasses.replace(alone, hits=0.0, compute=0, copy=0), batches=batches, seed=3)
    copy = intervals(dataclasses.replace(alone, fetch=0, cached=0, prepare=0, compute=0), batches=batches, seed=4)
    fetch = statistics.mean(cold) - statistics.mean(warm)
    return Rates(
        compute=1 / statistics.mean(step),
        prepare=1 / statistics.mean(warm),
        fetch=1 / fetch,
        copy=1 / statistics.mean(copy),
        prepare_jitter=statistics.stdev(warm) / statistics.mean(warm),
        fetch_jitter=math.sqrt(max(0.0, statistics.variance(cold) - statistics.variance(warm))) / fetch,
        copy_jitter=statistics.stdev(copy) / statistics.mean(copy),
        reads=ITEMS,
        step_jitter=statistics.stdev(step) / statistics.mean(step),
    )


def setup_of(plant: Plant) -> Setup:
    names = ("threads", "requests", "ahead", "hits", "joined")
    return Setup(cores=plant.threads, **{name: getattr(plant, name) for name in names})


def relieved(plant: Plant) -> dict[Stage, Plant]:
    """The plant without each of its possible bottlenecks."""
    return {
        "compute": dataclasses.replace(plant, compute=0.0),
        "fetch": dataclasses.replace(plant, fetch=0.0, cached=0.0),
        "prepare": dataclasses.replace(plant, prepare=0.0),
        "copy": dataclasses.replace(plant, copy=0.0),
        "queue": dataclasses.replace(plant, ahead=1000),
    }


def drawn_plant(draw: random.Random) -> Plant:
    threads = draw.choice([1, 2, 4, 8])
    return Plant(
        compute=math.exp(draw.uniform(-1.5, 1.5)),
        fetch=math.exp(draw.uniform(-1.0, 3.0)),
        cached=0.02,
        prepare=math.exp(draw.uniform(-1.0, 2.5)),
        copy=math.exp(draw.uniform(-3.0, 0.5)),
        jitter=draw.uniform(0.0, 0.4),
        hits=draw.choice([0.0, 0.35, 0.65, 0.9]),
        threads=threads,
        requests=draw.choice([1, 4, 16]),
        ahead=draw.choice([1, 2, threads, 2 * threads]),
        joined=draw.random() < 0.5,
    )


def scenarios(count: int, *, seed: int) -> Iterator[tuple[Plant, Stage]]:
    """Plants with one clear bottleneck, each kind in turn, and which it is: the stage without which the simulated run
    gains at least twice as much as without any other."""
    draw = random.Random(seed)
    kinds: list[Stage] = ["compute", "fetch", "prepare", "copy", "queue"]
    while count:
        plant, kind = drawn_plant(draw), kinds[count % len(kinds)]
        now, worlds = speed(plant), relieved(plant)
        gain = speed(worlds.pop(kind)) / now - 1.0
        if gain > 0.1 and all(gain > 2 * (speed(other) / now - 1.0) for other in worlds.values()):
            count -= 1
            yield plant, kind


def error(plant: Plant, *, batches: int = 200) -> float:
    return abs(forecast(measured(plant, batches=batches), setup_of(plant)).tokens_per_s / speed(plant) - 1.0)


def test_twenty_scenarios_of_injected_delays_are_diagnosed_and_predicted() -> None:
    drawn = list(scenarios(20, seed=7))
    assert [forecast(measured(plant), setup_of(plant)).binding for plant, _ in drawn] == [right for _, right in drawn]
    errors = [error(plant) for plant, _ in drawn]
    assert max(errors) < 0.10
    assert statistics.median(errors) < 0.05


def test_pipelines_without_a_clear_bottleneck_are_predicted_too() -> None:
    # Times that vary by up to 40 % have a mean known to 1.4 % from 800 batches, to 2.8 % from 200: with so few, the
    # noise of measuring would hide the error of the model, which is asked about here.
    draw = random.Random(11)
    errors = sorted(error(drawn_plant(draw), batches=800) for _ in range(100))
    assert errors[50] < 0.02
    assert errors[95] < 0.10


RATE = st.floats(1.0, 1e6)


@settings(deadline=None)
@given(compute=RATE, prepare=RATE, fetch=RATE, cache=RATE, copy=RATE, hits=st.floats(0, 1), cores=st.integers(1, 64))
def test_without_jitter_and_with_enough_ahead_the_speed_is_the_formula_of_ds_analyzer(
    compute: float, prepare: float, fetch: float, cache: float, copy: float, hits: float, cores: int
) -> None:
    rates = Rates(compute=compute, prepare=prepare, fetch=fetch, cache=cache, copy=copy)
    made = forecast(rates, Setup(threads=cores, cores=cores, ahead=1 << 30, hits=hits))
    wanted = min(compute, cores * prepare, copy, 1 / (hits / cache + (1 - hits) / fetch))
    assert made.tokens_per_s == pytest.approx(wanted)
    assert made.stall == pytest.approx(1 - wanted / compute)


@settings(deadline=None)
@given(compute=RATE, prepare=RATE, fetch=RATE, copy=RATE)
def test_without_reading_ahead_the_times_add(compute: float, prepare: float, fetch: float, copy: float) -> None:
    made = forecast(Rates(compute=compute, prepare=prepare, fetch=fetch, copy=copy), Setup(ahead=0))
    assert made.tokens_per_s == pytest.approx(1 / (1 / compute + 1 / prepare + 1 / fetch + 1 / copy))


@settings(deadline=None)
@given(
    rates=st.builds(Rates, compute=RATE, prepare=RATE, fetch=RATE, copy=RATE, prepare_jitter=st.floats(0, 1)),
    setup=st.builds(Setup, threads=st.integers(1, 8), cores=st.just(8), ahead=st.integers(1, 32), joined=st.booleans()),
)
def test_no_relief_makes_a_run_slower_and_no_stage_is_overtaken(rates: Rates, setup: Setup) -> None:
    now = forecast(rates, setup)
    assert now.tokens_per_s <= min(now.limits.values()) * (1 + 1e-9)
    for name in ("compute", "prepare", "fetch", "copy"):
        faster = dataclasses.replace(rates, **{name: 2 * getattr(rates, name)})
        assert forecast(faster, setup).tokens_per_s >= now.tokens_per_s * 0.98


def test_a_step_on_the_same_cores_pays_for_preparing() -> None:
    rates = Rates(compute=100.0, prepare=400.0)
    made = forecast(rates, Setup(threads=1, cores=2, cores_of_step=2))
    assert made.tokens_per_s == pytest.approx(1 / (1 / 100 + 1 / 800))


def test_threads_beyond_the_cores_still_fetch_when_they_fetch_and_prepare_in_one_go() -> None:
    rates = Rates(compute=1e9, prepare=100.0, fetch=10.0)
    few, many = (
        forecast(rates, Setup(threads=threads, cores=2, ahead=99, joined=True)).tokens_per_s for threads in (2, 8)
    )
    assert (few, many) == (pytest.approx(2 / 0.11), pytest.approx(8 / 0.11))


def test_mediums_differ_as_their_latency_and_bandwidth_say() -> None:
    small, large = 4096.0, 8 * 2**20
    assert MEDIUMS["hdd"].rate(request_bytes=small, requests=64) == pytest.approx(4096 / (12e-3 + 4096 / 250e6))
    assert MEDIUMS["hdd"].rate(request_bytes=large, requests=1) > 0.7 * 250e6
    assert MEDIUMS["object"].rate(request_bytes=large, requests=1) < 40e6
    assert MEDIUMS["object"].rate(request_bytes=large, requests=256) == 3e9
    assert MEDIUMS["nvme"].rate(request_bytes=small, requests=128) > 50 * MEDIUMS["nfs"].rate(
        request_bytes=small, requests=1
    )
    rates = on_medium(Rates(compute=1.0, prepare=1.0), MEDIUMS["ssd"], request_bytes=2**20, bytes_per_token=2.0)
    assert rates.bandwidth == pytest.approx(275e6)


def test_compression_trades_cores_for_bandwidth() -> None:
    rates = compressed(Rates(compute=1e3, prepare=100.0, fetch=50.0, bandwidth=200.0), ratio=2.0, decompress=100.0)
    assert (rates.fetch, rates.bandwidth, rates.prepare) == (100.0, 400.0, 50.0)


def test_a_cache_that_never_evicts_hits_its_share_from_the_second_epoch_on() -> None:
    draw = random.Random(0)
    held: set[int] = set()
    hits = 0
    for _ in range(4):
        for item in draw.sample(range(100), 100):
            hits += item in held
            if len(held) < 35:
                held.add(item)
    assert cache_hits(35, 100, epochs=4) == pytest.approx(hits / 400)
    assert cache_hits(35, 100) == 0.35
    assert cache_hits(500, 100) == 1.0
