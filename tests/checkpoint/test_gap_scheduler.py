"""Transfers in the gaps of a step: the simulation against closed forms, the gate against the windows."""

from __future__ import annotations

import math
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.checkpoint.tiers.gap_scheduler import (
    HOLD_S,
    StepTraffic,
    TrafficLearner,
    TransferForecast,
    TransferGate,
    TransferLink,
    choose_slice,
    intervals,
    learn,
    simulate,
)

FREE = StepTraffic(step_s=1.0)
MB = 1 << 20


@pytest.mark.parametrize("chunk", [MB, 3 * MB, 10 * MB, 64 * MB])
def test_a_transfer_without_contention_takes_what_the_closed_form_says(chunk: int) -> None:
    size, link = 50 * MB, TransferLink(bytes_per_s=100e6, latency_s=2e-3)
    transfer = simulate(link, FREE, size=size, chunk=chunk)
    assert transfer.seconds == pytest.approx(math.ceil(size / chunk) * 2e-3 + size / 100e6)
    assert transfer.stall_s == 0


def in_gaps(size: int, chunk: int, *, rate: float, latency: float, step: float, busy: float) -> float | None:
    """Seconds of a transfer in steps that are busy for their first `busy` seconds; None when a chunk fits nowhere."""
    sizes = [chunk] * (size // chunk) + ([size % chunk] if size % chunk else [])
    now = busy
    for one in sizes:
        need = latency + one / rate
        if need > step - busy:
            return None
        if now % step + need > step + 1e-9 or now % step < busy - 1e-9:
            now = math.ceil(now / step - 1e-9) * step + busy
        now += need
    return now


@pytest.mark.parametrize(("latency", "busy"), [(1e-4, 0.6), (5e-3, 0.3), (1e-2, 0.85)])
def test_the_chosen_chunk_is_the_best_of_all_and_keeps_out_of_the_way(latency: float, busy: float) -> None:
    size, rate, step = 40 * MB, 200e6, 1 / 8
    sizes = [MB * part // 8 for part in range(1, 161, 3)]
    profile = StepTraffic(step_s=step, busy=((0.0, busy * step),))
    link = TransferLink(bytes_per_s=rate, latency_s=latency, shared=True)
    chosen = choose_slice(link, profile, size=size, sizes=sizes)
    transfer = simulate(link, profile, size=size, chunk=chosen)
    times = {chunk: in_gaps(size, chunk, rate=rate, latency=latency, step=step, busy=busy * step) for chunk in sizes}
    best = min(time for time in times.values() if time is not None)
    assert transfer.stall_s == 0
    assert transfer.seconds == pytest.approx(best)
    assert times[chosen] == pytest.approx(best)


def test_what_fits_in_no_gap_goes_in_the_longest_and_is_counted() -> None:
    profile = StepTraffic(step_s=1.0, busy=((0.0, 0.5), (0.6, 0.9)))
    assert profile.longest_gap_s == pytest.approx(0.1)
    link = TransferLink(bytes_per_s=MB / 0.4, shared=True)
    assert simulate(link, profile, size=MB, chunk=MB).stall_s == pytest.approx(0.3)


@settings(max_examples=60, deadline=None)
@given(
    at=st.floats(0, 7),
    need=st.floats(0.001, 0.3),
    edges=st.lists(st.integers(0, 20), min_size=4, max_size=4, unique=True).map(sorted),
)
def test_a_start_is_the_first_moment_with_room(at: float, need: float, edges: list[int]) -> None:
    a, b, c, d = (edge / 20 for edge in edges)
    profile = StepTraffic(step_s=1.0, busy=((a, b), (c, d)))
    start = profile.start(at, need)
    if need <= profile.longest_gap_s:
        assert profile.overlap(start, start + need) == pytest.approx(0, abs=1e-9)
        # Nothing earlier on a fine grid has room, but for what rounding makes of an exact fit.
        earlier = [at + i * (start - at) / 50 for i in range(50)] if start > at + 1e-9 else []
        assert all(profile.overlap(moment, moment + need) > 0 for moment in earlier if moment < start - 1e-9)


def test_intervals_are_the_smallest_with_which_a_tier_keeps_up() -> None:
    traffic = StepTraffic(step_s=1.0, busy=((0.0, 0.5),))
    link = TransferLink(bytes_per_s=10 * MB, shared=True)
    # 2.4 s of the link per copy, of which half a second per step is free: five steps.
    assert intervals(["peer"], link, traffic, size=24 * MB, chunk=MB) == {"peer": 5}
    seconds = simulate(link, traffic, size=24 * MB, chunk=MB).seconds
    assert 4 < seconds <= 5
    two = intervals(["peer", "remote"], link, traffic, size=24 * MB, chunk=MB)
    assert 2.4 / two["peer"] + 2.4 / two["remote"] <= 0.5
    # A step without a gap does not stop copies for good.
    full = StepTraffic(step_s=1.0, busy=((0.0, 1.0),))
    assert intervals(["peer"], link, full, size=24 * MB, chunk=MB) == {"peer": 480}


class Time:
    """A clock that sleeping moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_the_gate_keeps_the_busy_windows_of_a_learned_step_free() -> None:
    time = Time()
    learner = TrafficLearner(clock=time)
    for _ in range(6):
        learner.step()
        time.now += 0.2
        with learner.busy():
            time.now += 0.5
        time.now += 0.3
    learner.step()
    profile = learner.traffic()
    assert profile is not None
    assert profile.step_s == pytest.approx(1.0)
    assert profile.busy == ((pytest.approx(0.2, abs=1.01 / 200), pytest.approx(0.7, abs=1.01 / 200)),)
    gate = TransferGate(bytes_per_s=20.0, slice_bytes=1, learner=learner, clock=time, sleep=time.sleep)
    began, sent = time.now, []
    for _ in range(81):
        gate.wait(1)
        sent.append(time.now)
        time.now += 0.05
    true = StepTraffic(step_s=1.0, busy=((0.2, 0.7),))
    assert all(true.overlap(moment - began, moment + 0.05 - began) < 1e-6 for moment in sent)
    # A gap of nearly half a second holds nine slices of a twentieth: 81 of them need nine gaps.
    assert sent[-1] - began == pytest.approx(9.0, abs=0.2)
    assert gate.waited_s == pytest.approx(sent[-1] - began - 80 * 0.05)


class InFlight(TrafficLearner):
    """Waits on a clock that waiting moves: what is in flight ends after `seconds`."""

    def __init__(self, time: Time, *, seconds: float) -> None:
        super().__init__(clock=time)
        self._time, self._seconds = time, seconds

    def wait_free(self, timeout_s: float) -> bool:
        if not self._in_flight:
            return super().wait_free(0.0)
        (begin,) = self._in_flight
        left = begin + self._seconds - self._time.now
        self._time.now += min(left, timeout_s)
        if left <= timeout_s:
            self.mark(begin, self._time.now)
        return False


def test_a_slice_waits_for_what_is_in_flight_but_not_for_ever() -> None:
    time = Time()
    learner = InFlight(time, seconds=0.25)
    gate = TransferGate(slice_bytes=1, learner=learner, clock=time, sleep=time.sleep)
    learner.begin_use(time.now)
    start = time.now
    gate.wait(1)
    assert time.now - start == gate.waited_s == pytest.approx(0.25)
    gate.wait(1)
    assert gate.waited_s == pytest.approx(0.25)
    stuck = InFlight(time, seconds=math.inf)
    stuck.begin_use(time.now)
    gate = TransferGate(slice_bytes=1, learner=stuck, clock=time, sleep=time.sleep)
    gate.wait(1)
    assert gate.waited_s == pytest.approx(HOLD_S)
    # What nobody waits for in a whole step is forgotten.
    for _ in range(3):
        time.now += 1.0
        stuck.step()
    assert stuck.wait_free(0.0)


def test_a_gate_without_a_profile_only_limits_the_rate() -> None:
    time = Time()
    gate = TransferGate(bytes_per_s=100.0, slice_bytes=10, clock=time, sleep=time.sleep)
    start = time.now
    for _ in range(11):
        gate.wait(10)
    assert time.now - start == pytest.approx(1.0)


def test_windows_that_come_in_few_steps_are_not_learned() -> None:
    often, seldom = (0.0, 0.25), (0.5, 0.75)
    steps = [(1.0, (often, seldom) if number % 4 == 0 else (often,)) for number in range(16)]
    profile = learn(steps)
    assert profile.busy == ((pytest.approx(0.0), pytest.approx(0.25)),)


def test_a_forecast_learns_the_rate_of_the_link_without_the_waiting() -> None:
    forecast = TransferForecast()
    assert forecast.seconds(100, None, chunk=10) is None
    forecast.add(1000, seconds=4.0, waited_s=2.0)
    assert forecast.bytes_per_s == 500
    assert forecast.seconds(2000, None, chunk=100) == pytest.approx(4.0)
    # Half of every step is busy: what takes 4 s of the link takes 8.
    half_busy = StepTraffic(step_s=1.0, busy=((0.0, 0.5),))
    assert forecast.seconds(2000, half_busy, chunk=50) == pytest.approx(8.0, abs=0.01)


def test_marks_and_readers_may_be_in_different_threads() -> None:
    learner = TrafficLearner()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            learner.traffic()

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(300):
        learner.step()
        with learner.busy():
            pass
    stop.set()
    reader.join()
    assert learner.traffic() is not None
