"""The figures of an interval, by simple arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ropewalk.parallel.comm import Traffic
from ropewalk.parallel.executor import StepResult
from ropewalk.train.hooks.metrics import Meter, all_finite, line
from ropewalk.train.measure.ceilings import peak_flops


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Clock:
    return Clock()


def meter(time: Clock, **changes: Any) -> Meter:
    settings = {"peak_flops": 24_000.0, **changes}
    return Meter(torch.device("cpu"), clock=time, **settings)


def result(loss: float, *, norm: float = 1.0, skipped: float = 0.0) -> StepResult:
    return StepResult(torch.tensor(loss), torch.tensor(norm), torch.tensor(skipped), torch.tensor(int(skipped)))


def take_steps(meter: Meter, time: Clock, losses: list[float]) -> None:
    for number, loss in enumerate(losses):
        with meter.watch("data"):
            time.now += 0.1
        time.now += 0.4
        meter.add(result(loss, norm=float(number), skipped=float(number == 1)), tokens=1000, flops=6000)


def test_means_run_over_the_interval(time: Clock) -> None:
    traffic = Traffic()
    here = meter(time, traffic=traffic)
    take_steps(here, time, [4.0, 3.0, 2.0, 1.0])
    traffic.add("replicas", "all_reduce", 1000)
    traffic.waited_s += 0.8
    record = here.read(40, tokens=40000, lr=0.5)
    memory = record.pop("memory_bytes")
    assert record.pop("sent_bytes") == {"replicas all_reduce": 250.0}
    assert record == pytest.approx(
        {
            "step": 40,
            "tokens": 40_000,
            "loss": 2.5,
            "lr": 0.5,
            "grad_norm": 3.0,
            "skipped": 1,
            "loss_scale": None,
            "step_s": 0.5,
            "data_wait_s": 0.1,
            "exposed_s": 0.2,
            "busy_s": 0.2,
            "tokens_per_s": 2000.0,
            "flops_per_s": 12_000.0,
            "mfu": 0.5,
        }
    )
    assert 10e6 < memory < 1e12


def test_an_interval_knows_nothing_of_the_one_before(time: Clock) -> None:
    here = meter(time, peak_flops=None)
    take_steps(here, time, [100.0, 100.0])
    here.read(2, tokens=2000, lr=1.0)
    take_steps(here, time, [7.0])
    record = here.read(3, tokens=3000, lr=1.0)
    assert (record["loss"], record["skipped"], record["mfu"]) == (7.0, 0, None)
    assert (record["step_s"], record["data_wait_s"]) == pytest.approx((0.5, 0.1))


def test_pauses_and_what_came_before_the_start_do_not_count(time: Clock) -> None:
    here = meter(time)
    time.now += 1000
    here.restart()
    take_steps(here, time, [1.0])
    with here.paused():
        time.now += 77
    take_steps(here, time, [1.0])
    assert here.read(2, tokens=2000, lr=1.0)["step_s"] == pytest.approx(0.5)


def test_the_line_is_aligned_and_leaves_out_an_unknown_mfu(time: Clock) -> None:
    here = meter(time)
    take_steps(here, time, [2.0])
    record = here.read(7, tokens=7000, lr=3e-4)
    text = line(record)
    assert text.startswith("loss 2.0000     2,000 tokens/s  grad 0.00   lr 3.00e-04  mfu 50% ")
    assert text.endswith("data wait 20.0%")
    assert "mfu" not in line({**record, "mfu": None})


def test_a_single_bad_number_is_found() -> None:
    good = [torch.zeros(3), torch.ones(2, 2)]
    assert all_finite(good)
    assert not all_finite([*good, torch.tensor([1.0, float("nan")])])
    assert not all_finite([torch.tensor(float("-inf")), *good])


def test_the_measured_peak_of_a_cpu_is_that_of_a_cpu() -> None:
    peak = peak_flops(torch.device("cpu"), "fp32")
    assert peak is not None
    assert 1e9 < peak < 1e14


def test_a_loss_that_is_not_finite_does_not_hide_the_others(time: Clock) -> None:
    here = meter(time)
    take_steps(here, time, [2.0, float("nan"), 4.0])
    assert here.read(3, tokens=3000, lr=1.0)["loss"] == 3.0
    take_steps(here, time, [float("inf")])
    assert math.isnan(here.read(4, tokens=4000, lr=1.0)["loss"])


def test_anomalies_are_told_once_in_order(time: Clock) -> None:
    here = meter(time)
    take_steps(here, time, [1.0, 1.0, 1.0])
    assert here.take_anomalies() == [0, 1, 0]
    assert here.take_anomalies() == []
