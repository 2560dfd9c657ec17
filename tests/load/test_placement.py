"""CPU or device for each stage of preparing: the fastest run, with what the device gives up charged."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.load.forecast import Rates, Setup
from ropewalk.load.placement import Device, Work, place

SETUP = Setup(threads=4, cores=4, ahead=1 << 20)


def work(name: str, core_ms: float, device_ms: float = math.inf, mega: float = 0.0) -> Work:
    return Work(name=name, core_s=core_ms / 1e3, device_s=device_ms / 1e3, device_bytes=mega * 1e6)


def test_preparing_moves_to_the_device_when_the_cores_are_the_limit() -> None:
    works = [work("decode", 4.0), work("resize", 8.0, 0.05), work("normalise", 4.0, 0.05)]
    placed = place(works, Rates(compute=900.0, prepare=math.inf), SETUP, device=Device())
    assert (placed.on_cpu, placed.on_device) == (("decode",), ("resize", "normalise"))
    assert placed.forecast.tokens_per_s == pytest.approx(1 / (1 / 900 + 1e-4))


def test_nothing_moves_when_the_step_is_the_limit() -> None:
    works = [work("decode", 4.0), work("resize", 8.0, 0.01)]
    placed = place(works, Rates(compute=100.0, prepare=math.inf), SETUP, device=Device())
    assert placed.on_device == ()


def test_memory_that_the_step_needs_is_charged() -> None:
    works = [work("resize", 8.0, 0.01, mega=400.0)]
    rates = Rates(compute=600.0, prepare=math.inf)
    roomy = place(works, rates, SETUP, device=Device(free_bytes=1e9, activation_bytes=1e9))
    tight = place(works, rates, SETUP, device=Device(free_bytes=0.0, activation_bytes=420e6))
    full = place(works, rates, SETUP, device=Device(free_bytes=0.0, activation_bytes=300e6))
    assert (roomy.on_device, tight.on_device, full.on_device) == (("resize",), (), ())


@settings(deadline=None, max_examples=50)
@given(
    times=st.lists(st.tuples(st.floats(0.01, 20.0), st.floats(0.001, 5.0)), min_size=1, max_size=4),
    compute=st.floats(10.0, 5000.0),
)
def test_no_other_suffix_is_faster(times: list[tuple[float, float]], compute: float) -> None:
    works = [work(str(number), *pair) for number, pair in enumerate(times)]
    placed = place(works, Rates(compute=compute, prepare=math.inf), SETUP, device=Device())
    speeds = []
    for split in range(len(times) + 1):
        cpu_s = sum(core for core, _ in times[:split]) / 1e3
        gpu_s = 1 / compute + sum(device for _, device in times[split:]) / 1e3
        speeds.append(min(4 / cpu_s if cpu_s else math.inf, 1 / gpu_s))
    assert placed.forecast.tokens_per_s >= max(speeds) / 1.01**4
    assert list(itertools.chain(placed.on_cpu, placed.on_device)) == [each.name for each in works]
