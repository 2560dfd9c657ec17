"""The learning rate, in closed form."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.train.config import BatchRamp, LengthRamp, Phase, Schedule, Train
from ropewalk.train.hooks.validation import Plateau
from ropewalk.train.lr_schedule import SCHEDULES, Extent, learning_rate


def rates(steps: int, *, tokens: int = 1, epoch: int = 1, **settings: Any) -> list[float]:
    schedule, extent = (
        Schedule(**settings),
        Extent(steps=steps, tokens=lambda done: done * tokens, tokens_per_epoch=epoch),
    )
    return [learning_rate(step, extent=extent, schedule=schedule) for step in range(steps)]


def test_warm_up_is_a_line_and_decay_half_a_cosine() -> None:
    got = rates(101, peak_lr=2.0, warmup_steps=20, final_lr_ratio=0.25)
    assert got[:20] == pytest.approx([2.0 * (step + 1) / 21 for step in range(20)])
    assert got[20:] == pytest.approx([1.25 + 0.75 * math.cos(math.pi * (step - 20) / 80) for step in range(20, 101)])


def test_the_first_update_moves_and_the_last_has_the_final_share() -> None:
    got = rates(50, peak_lr=1.0, warmup_steps=9, final_lr_ratio=0.1)
    assert (got[0], got[9], got[-1]) == pytest.approx((0.1, 1.0, 0.1))


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"),
    [(1, 0, [1.0]), (2, 0, [1.0, 0.5]), (1, 1, [0.5]), (3, 2, [1 / 3, 2 / 3, 1.0])],
)
def test_the_shortest_runs(steps: int, warmup: int, expected: list[float]) -> None:
    assert rates(steps, peak_lr=1.0, warmup_steps=warmup, final_lr_ratio=0.5) == pytest.approx(expected)


@given(steps=st.integers(1, 400), share=st.floats(0, 1), data=st.data())
def test_the_rate_rises_to_the_peak_then_falls_without_jumps(steps: int, share: float, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps))
    got = rates(steps, peak_lr=1.0, warmup_steps=warmup, final_lr_ratio=share)
    rising, falling = got[: warmup + 1], got[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 <= rate <= 1 for rate in got)
    # The steepest slopes: of the line, and of the cosine at its middle.
    steepest = max(1 / (warmup + 1), math.pi / 2 / max(1, steps - 1 - warmup)) * (1 + 1e-9)
    assert all(abs(after - before) <= steepest for before, after in itertools.pairwise(got))


def test_a_line_down_and_a_constant() -> None:
    line = rates(101, shape="linear", peak_lr=2.0, warmup_steps=20, final_lr_ratio=0.25)
    assert line[20:] == pytest.approx([2.0 - 1.5 * (step - 20) / 80 for step in range(20, 101)])
    assert rates(30, shape="constant", peak_lr=2.0, warmup_steps=9)[9:] == [2.0] * 21


@pytest.mark.parametrize("shape", SCHEDULES)
def test_every_shape_begins_with_the_same_warm_up(shape: str) -> None:
    milestones = (50.0,) if shape == "step" else ()
    got = rates(60, shape=shape, peak_lr=3.0, warmup_steps=5, milestones=milestones)
    assert got[:6] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.5, 3.0])


@pytest.mark.parametrize(
    ("unit", "milestones"), [("steps", (30, 60)), ("tokens", (29 * 512 + 1, 60 * 512)), ("epochs", (1.5, 3))]
)
def test_the_rate_falls_once_a_milestone_lies_behind(unit: str, milestones: tuple[float, ...]) -> None:
    got = rates(
        80, tokens=512, epoch=20 * 512, shape="step", peak_lr=1.0, warmup_steps=0, factor=0.5,
        milestones=milestones, milestone_unit=unit,
    )  # fmt: skip
    assert got == [1.0] * 30 + [0.5] * 30 + [0.25] * 20


@pytest.mark.parametrize("form", ["linear", "1-sqrt"])
def test_wsd_keeps_the_peak_and_decays_in_the_last_share(form: str) -> None:
    got = rates(100, shape="wsd", peak_lr=1.0, warmup_steps=10, final_lr_ratio=0.2, decay_share=0.25, decay_form=form)
    # Step 74 is the last at the peak, step 99 the last of the run: 25 steps down.
    assert got[10:75] == [1.0] * 65
    power = 0.5 if form == "1-sqrt" else 1.0
    assert got[75:] == pytest.approx([1 - 0.8 * (step / 25) ** power for step in range(1, 26)])


def observed(losses: list[float], **settings: Any) -> list[float]:
    plateau = Plateau(Schedule(shape="adaptive", **settings))
    shares = []
    for loss in losses:
        plateau.observe(loss)
        shares.append(plateau.share)
    return shares


def test_the_rate_falls_when_validation_has_not_gained_for_the_patience() -> None:
    losses = [3.0, 2.0, 2.0, 2.5, 1.0, 1.5, 1.0, 1.2, 1.1, 0.9]
    assert observed(losses, factor=0.5, patience=2, final_lr_ratio=0.0) == [
        1,
        1,
        1,
        0.5,
        0.5,
        0.5,
        0.25,
        0.25,
        0.125,
        0.125,
    ]


def test_small_gains_do_not_count_and_the_share_has_a_floor() -> None:
    losses = [3.0, 2.99, 2.98, 2.97, 2.96, 2.9]
    assert observed(losses, factor=0.5, patience=1, min_delta=0.05, final_lr_ratio=0.3) == [1, 0.5, 0.3, 0.3, 0.3, 0.3]
    assert observed(losses, factor=0.5, patience=1, final_lr_ratio=0.3) == [1] * 6
    assert observed([2.0, math.nan, math.nan], factor=0.5, patience=2, final_lr_ratio=0.0) == [1, 1, 0.5]


@given(losses=st.lists(st.floats(0, 10), max_size=30), placement=st.integers(0, 30))
def test_what_a_plateau_remembers_survives_json(losses: list[float], placement: int) -> None:
    schedule = Schedule(shape="adaptive", factor=0.7, patience=2)
    whole, first, second = Plateau(schedule), Plateau(schedule), Plateau(schedule)
    for loss in losses:
        whole.observe(loss)
    for loss in losses[:placement]:
        first.observe(loss)
    second.load(json.loads(json.dumps(first.state())))
    for loss in losses[placement:]:
        second.observe(loss)
    assert (second.share, second.state()) == (whole.share, whole.state())


def test_other_schedules_do_not_listen_to_validation() -> None:
    plateau = Plateau(Schedule(patience=1))
    assert [plateau.observe(loss) for loss in (1.0, 2.0, 3.0)] == [False] * 3
    assert (plateau.share, plateau.state()) == (1.0, {})


def problems(train: Train) -> list[str]:
    return [key for section in (train.schedule, train) for key, _ in section.check()]


def test_settings_that_contradict_each_other_are_problems_of_the_recipe() -> None:
    def of(**schedule: Any) -> list[str]:
        return problems(Train(steps=100, schedule=Schedule(**schedule)))

    assert of(shape="step") == ["milestones"]
    assert of(milestones=(3.0,)) == ["milestones"]
    assert of(shape="step", milestones=(5.0, 3.0)) == ["milestones"]
    assert of(shape="step", milestones=(3.0, 5.0)) == []
    assert of(shape="wsd", warmup_steps=50, decay_share=0.6) == ["schedule.decay_share"]
    assert of(shape="wsd", warmup_steps=50, decay_share=0.5) == []


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (400, 40), (5000, 100)])
def test_warm_up_that_is_not_set_is_a_tenth_of_the_run_and_at_most_100(steps: int, warmup: int) -> None:
    assert Schedule().warmup(steps) == warmup
    assert not list(Train(steps=steps).check())
    assert problems(Train(schedule=Schedule(shape="adaptive"), validate_every_steps=0)) == ["validate_every_steps"]


def test_a_warm_up_longer_than_the_run_is_a_problem_of_the_recipe() -> None:
    problems = list(Train(steps=10, schedule=Schedule(warmup_steps=11)).check())
    assert [key for key, _ in problems] == ["schedule.warmup_steps"]
    assert list(Train(steps=10, schedule=Schedule(warmup_steps=10)).check()) == []


@pytest.mark.parametrize("where", ["run", "first phase", "own phase"])
@pytest.mark.parametrize("kind", ["batch", "length"])
def test_a_ramp_that_does_not_end_within_its_steps_is_a_problem_of_the_recipe(kind: str, where: str) -> None:
    def found(over_steps: int) -> list[tuple[str, str]]:
        ramp = (
            BatchRamp(from_size=4, over_steps=over_steps)
            if kind == "batch"
            else LengthRamp(from_length=8, over_steps=over_steps)
        )
        ramps: dict[str, Any] = {f"{kind}_ramp": ramp}
        if where == "run":
            return list(Train(steps=10, **ramps).check())
        if where == "first phase":
            return list(Train(phases=(Phase(steps=10), Phase(steps=5)), **ramps).check())
        return list(Train(phases=(Phase(steps=50), Phase(steps=10, **ramps))).check())

    assert found(9) == []
    for over_steps in (10, 600):
        ((key, text),) = found(over_steps)
        assert key == f"{'phases.1.' if where == 'own phase' else ''}{kind}_ramp.over_steps"
        assert f"the 10 steps of the {'run' if where == 'run' else 'phase'}; lower it or raise the steps" in text


def test_a_ramp_of_rows_that_do_not_divide_the_batch_is_named_where_it_stands() -> None:
    ramp, own = BatchRamp(from_size=3, over_steps=2), Schedule(warmup_steps=0)
    assert problems(Train(batch_ramp=ramp, phases=(Phase(steps=9, schedule=own),))) == ["batch_ramp.from_size"]
    assert problems(Train(phases=(Phase(steps=9, batch_ramp=ramp),))) == ["phases.0.batch_ramp.from_size"]


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant", "step"])
def test_a_restart_begins_the_schedule_anew_for_the_steps_up_to_the_next_one(shape: str) -> None:
    settings: dict[str, Any] = {"shape": shape, "peak_lr": 2.0, "milestones": (10.0,) if shape == "step" else ()}
    got = rates(100, restarts=(30, 70), **settings)
    parts = [rates(30, **settings), rates(40, **settings), rates(30, **settings)]
    assert got == [rate for part in parts for rate in part]


def test_milestones_in_tokens_count_from_the_restart_on() -> None:
    got = rates(
        40, tokens=512, shape="step", peak_lr=1.0, warmup_steps=0, factor=0.5, restarts=(20,),
        milestones=(10.0 * 512,), milestone_unit="tokens",
    )  # fmt: skip
    assert got == ([1.0] * 10 + [0.5] * 10) * 2


def test_restarts_that_cannot_be_are_problems_of_the_recipe() -> None:
    def of(steps: int, *restarts: int, **schedule: Any) -> list[str]:
        return problems(Train(steps=steps, schedule=Schedule(restarts=restarts, **schedule)))

    assert of(100, 50) == []
    assert of(100, 50, 20) == ["restarts"]
    assert of(100, 100) == ["schedule.restarts"]
    assert of(100, 90, warmup_steps=20) == ["schedule.warmup_steps"]
