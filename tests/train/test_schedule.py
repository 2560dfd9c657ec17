"""The learning rate, in closed form."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.train.config import Schedule, Train
from ropewalk.train.schedule import Run, learning_rate


def rates(steps: int, **settings: float) -> list[float]:
    schedule = Schedule(**settings)  # type: ignore[arg-type]
    return [learning_rate(step, run=Run(steps=steps), schedule=schedule) for step in range(steps)]


def test_warm_up_is_a_line_and_decay_half_a_cosine() -> None:
    got = rates(101, peak_lr=2.0, warmup_steps=20, final_share=0.25)
    assert got[:20] == pytest.approx([2.0 * (step + 1) / 21 for step in range(20)])
    assert got[20:] == pytest.approx([1.25 + 0.75 * math.cos(math.pi * (step - 20) / 80) for step in range(20, 101)])


def test_the_first_update_moves_and_the_last_has_the_final_share() -> None:
    got = rates(50, peak_lr=1.0, warmup_steps=9, final_share=0.1)
    assert (got[0], got[9], got[-1]) == pytest.approx((0.1, 1.0, 0.1))


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [(1, 0, [1.0]), (2, 0, [1.0, 0.5]), (1, 1, [0.5]), (3, 2, [1 / 3, 2 / 3, 1.0])],
)
def test_the_shortest_runs(steps: int, warmup: int, expected: list[float]) -> None:
    assert rates(steps, peak_lr=1.0, warmup_steps=warmup, final_share=0.5) == pytest.approx(expected)


@given(steps=st.integers(1, 400), share=st.floats(0, 1), data=st.data())
def test_the_rate_rises_to_the_peak_then_falls_without_jumps(steps: int, share: float, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    got = rates(steps, peak_lr=1.0, warmup_steps=warmup, final_share=share)
    rising, falling = got[: warmup + 1], got[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 <= rate <= 1 for rate in got)
    # The steepest slopes: of the line, and of the cosine at its middle.
    steepest = max(1 / (warmup + 1), math.pi / 2 / max(1, steps - 1 - warmup)) * (1 + 1e-9)
    assert all(abs(after - before) <= steepest for before, after in itertools.pairwise(got))


def test_a_warm_up_longer_than_the_run_is_a_problem_of_the_recipe() -> None:
    problems = list(Train(steps=10, schedule=Schedule(warmup_steps=11)).check())
    assert [key for key, _ in problems] == ["schedule.warmup_steps"]
    assert list(Train(steps=10, schedule=Schedule(warmup_steps=10)).check()) == []
