"""Remedies: each is what the forecast says it is, and the cheapest that does most of the good comes first."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.forecast import Rates, Setup, forecast
from ropewalk.load.remedies import ENOUGH, WORTH, Facts, Price, cheapest, remedies, what_ifs, with_cores

FACTS = Facts(data_bytes=1e9, batch_bytes=2e4, memory_bytes=4e8, disk_bytes=2e9, epochs=10.0)
RATE = st.floats(1e3, 1e8)


def names(rates: Rates, setup: Setup, facts: Facts = FACTS) -> list[str]:
    return [remedy.what for remedy in remedies(rates, setup, facts)]


def test_a_run_that_does_not_wait_needs_no_remedy() -> None:
    assert names(Rates(compute=1e4, prepare=1e6), Setup(cores=8)) == []


def test_few_threads_are_the_cheapest_to_mend() -> None:
    rates = Rates(compute=1e6, prepare=3e5, batch_tokens=1e4)
    found = remedies(rates, Setup(threads=1, cores=16, ahead=2), FACTS)
    best = cheapest(found)
    assert best is not None
    assert (best.price, best.settings) == (Price.SETTING, {"load.threads": 4})
    assert best.forecast.stall < 0.02


def test_a_slow_store_is_mended_by_memory_before_disk_and_hardware() -> None:
    rates = Rates(compute=1e6, prepare=1e7, fetch=1e5, bandwidth=2e5, batch_tokens=1e4)
    found = remedies(rates, Setup(threads=1, cores=2, ahead=64, requests=8), FACTS)
    assert [remedy.price for remedy in found] == sorted(remedy.price for remedy in found)
    ram, disk = (next(r for r in found if r.what.startswith(tier)) for tier in ("ram", "disk"))
    assert ram.settings == {"load.cache.ram_bytes": 400_000_000}
    assert ram.gain == pytest.approx(1 / (1 - 0.36) - 1, rel=0.05)
    assert disk.gain > ram.gain
    assert cheapest(found) == disk


def test_a_store_that_answers_slowly_is_asked_more_at_once() -> None:
    rates = Rates(compute=1e6, prepare=1e8, fetch=2e5, bandwidth=9e5, batch_tokens=1e4)
    best = cheapest(remedies(rates, Setup(threads=1, cores=1, ahead=64, requests=1), FACTS))
    assert best is not None
    assert best.settings == {"load.remote.max_requests": 8}
    assert best.gain == pytest.approx(9e5 / 2e5 - 1, rel=0.02)


def test_too_small_a_window_is_mended_by_reading_further_ahead() -> None:
    rates = Rates(compute=1e6, prepare=1.2e6, fetch=2e5, bandwidth=1.2e6, batch_tokens=1e4)
    facts = dataclasses.replace(FACTS, memory_bytes=0.0, disk_bytes=0.0)
    best = cheapest(remedies(rates, Setup(threads=1, cores=1, ahead=1, requests=6), facts))
    assert best is not None
    assert set(best.settings) == {"load.prefetch_bytes"}


def test_compression_is_offered_with_what_it_was_measured_to_give() -> None:
    facts = dataclasses.replace(FACTS, compression=2.0, decompress=1e9, memory_bytes=0.0, disk_bytes=0.0)
    rates = Rates(compute=1e6, prepare=1e7, fetch=1e5, bandwidth=1e5, batch_tokens=1e4)
    found = remedies(rates, Setup(threads=1, cores=2, ahead=64), facts)
    gain = next(remedy.gain for remedy in found if remedy.price == Price.CONVERSION)
    assert gain == pytest.approx(1.0, rel=0.02)


@settings(deadline=None, max_examples=50)
@given(
    rates=st.builds(Rates, compute=RATE, prepare=RATE, fetch=RATE, bandwidth=RATE, batch_tokens=st.just(1e4)),
    setup=st.builds(Setup, threads=st.integers(1, 4), cores=st.just(4), ahead=st.integers(0, 8), joined=st.booleans()),
)
def test_every_remedy_gains_what_it_says_and_the_cheapest_gains_most_of_it(rates: Rates, setup: Setup) -> None:
    found = remedies(rates, setup, FACTS)
    now = forecast(rates, setup).tokens_per_s
    for remedy in found:
        assert remedy.gain >= WORTH
        assert remedy.forecast.tokens_per_s == pytest.approx(now * (1 + remedy.gain))
    best = cheapest(found)
    assert (best is None) == (not found)
    if best:
        here = [remedy for remedy in found if remedy.price < Price.HARDWARE] or found
        assert best in here
        assert best.gain >= ENOUGH * max(remedy.gain for remedy in here)


def test_what_ifs_begin_with_the_present_and_name_every_store() -> None:
    rows = what_ifs(Rates(compute=1e6, prepare=1e7, fetch=1e6), Setup(cores=2), FACTS)
    assert rows[0].forecast == forecast(Rates(compute=1e6, prepare=1e7, fetch=1e6), Setup(cores=2))
    assert all(any(name in row.what for row in rows) for name in ("hdd", "ssd", "nvme", "nfs", "object"))


def test_a_step_on_the_cpu_is_faster_on_more_cores_and_one_on_a_gpu_is_not() -> None:
    rates = Rates(compute=100.0, prepare=math.inf)
    here, _ = with_cores(rates, Setup(cores=2, cores_of_step=2), 8)
    there, _ = with_cores(rates, Setup(cores=2), 8)
    assert (here.compute, there.compute) == (400.0, 100.0)
