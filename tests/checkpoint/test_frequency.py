"""The interval between saves: its bounds, and the goodput it gives under published failure rates."""

from __future__ import annotations

import math
import random

import pytest

from ropewalk.checkpoint.frequency import GPU_HOURS_A_FAILURE, Frequency

HOUR = 3600.0


def measured(frequency: Frequency, *, step_s: float = 1.0, blocked_s: float = 0.5, persist_s: float = 2.0) -> Frequency:
    for _ in range(20):
        frequency.saw_step(step_s)
        frequency.saw_save(blocked_s=blocked_s, persist_s=persist_s)
    return frequency


def test_the_longest_bound_holds_and_is_named() -> None:
    slow_disk = measured(Frequency(mtbf_hours=0.01), persist_s=500.0).decide()
    assert (slow_disk.bound, slow_disk.steps) == ("persist", 500)
    tight = measured(Frequency(overhead=0.001, mtbf_hours=0.01)).decide()
    assert (tight.bound, tight.steps) == ("overhead", 500)
    safe = measured(Frequency(mtbf_hours=8.0)).decide()
    assert safe.bound == "failures"
    assert safe.interval_s == pytest.approx(math.sqrt(2 * 0.5 * (8 * HOUR + 20)))
    assert "a save blocks for 0.500 s and a failure is due every 8.0 h" in str(safe)


def test_nothing_measured_means_an_early_save() -> None:
    first = Frequency().decide()
    assert (first.bound, first.steps) == ("first", 10)
    assert "to measure" in str(first)


def test_failures_that_are_seen_shorten_the_interval_and_quiet_time_lengthens_it() -> None:
    quiet, troubled = Frequency(mtbf_hours=1), Frequency(mtbf_hours=1)
    for _ in range(10):
        measured(quiet, step_s=60.0)
        measured(troubled, step_s=60.0)
        troubled.saw_failure()
    assert troubled.decide().interval_s < quiet.decide().interval_s
    assert quiet.mtbf_s == pytest.approx(HOUR + 200 * 60)
    assert troubled.mtbf_s == pytest.approx((HOUR + 200 * 60) / 11)


def test_one_slow_save_does_not_move_the_median() -> None:
    steady, hiccup = measured(Frequency(mtbf_hours=8)), measured(Frequency(mtbf_hours=8))
    hiccup.saw_save(blocked_s=100.0, persist_s=900.0)
    assert hiccup.decide().interval_s == steady.decide().interval_s


def goodput(interval_s: float, failures: list[float], *, blocked_s: float, restore_s: float, total_s: float) -> float:
    """Share of `total_s` that went into steps that were kept, failures at the given times. Written out second by
    second's worth: work since the last save is lost, a save costs `blocked_s`, a failure `restore_s`."""
    now = kept = 0.0
    for failure in [*failures, total_s]:
        while now < failure:
            done = min(interval_s, failure - now)
            if done < interval_s or now + interval_s + blocked_s > failure:
                now = failure
                break
            now += interval_s + blocked_s
            kept += interval_s
        if failure < total_s:
            now = failure + restore_s
    return kept / total_s


@pytest.mark.parametrize("gpus", [1024, 4096, 16_384])
@pytest.mark.parametrize("blocked_s", [0.3, 5.0])
def test_goodput_is_within_one_percent_of_the_best_fixed_interval(gpus: int, blocked_s: float) -> None:
    """Traces with the published rate (1.8 h between failures at 16,384 GPUs, 7.9 h at 1,024); the controller knows
    the cluster's size only, the search knows the trace."""
    mtbf_s = {1024: 7.9 * HOUR, 4096: 4.0 * HOUR, 16_384: 1.8 * HOUR}[gpus]
    draw = random.Random(gpus)
    total_s, restore_s = 54 * 24 * HOUR, 180.0
    failures, now = [], draw.expovariate(1 / mtbf_s)
    while now < total_s:
        failures.append(now)
        now += restore_s + draw.expovariate(1 / mtbf_s)
    costs = {"blocked_s": blocked_s, "restore_s": restore_s, "total_s": total_s}
    frequency = Frequency(overhead=0.05, ranks=gpus)
    # It learns as it goes: an interval for each stretch between failures.
    kept = begin = 0.0
    for failure in [*failures, total_s]:
        span = failure - begin
        for _ in range(16):
            frequency.saw_step(1.0)
            frequency.saw_save(blocked_s=blocked_s, persist_s=30.0)
        interval = frequency.decide().interval_s
        kept += interval * math.floor(max(0.0, span) / (interval + blocked_s))
        frequency.saw_step(span)
        frequency.saw_failure()
        begin = failure + restore_s
    ours = kept / total_s
    best = max(goodput(interval, failures, **costs) for interval in (30 * 1.15**n for n in range(60)))
    assert ours >= 0.99 * best, f"{ours:.4f} against {best:.4f}"


def test_before_any_failure_the_size_of_the_cluster_tells_the_rate() -> None:
    assert Frequency(ranks=1000).mtbf_s == pytest.approx(GPU_HOURS_A_FAILURE * HOUR / 1000)
