"""How far two versions of a phase train the same, against the learning rates step by step."""

from __future__ import annotations

import dataclasses

from hypothesis import assume, given
from hypothesis import strategies as st

from ropewalk.train.config import Schedule, Share, Train
from ropewalk.train.lr_schedule import Extent, learning_rate
from ropewalk.train.phase_spec import PhaseSpec, common_steps, phases_of, same_but_steps, same_phase


def phase(steps: int, schedule: Schedule, **settings: object) -> PhaseSpec:
    (found,) = phases_of(Train(steps=steps, schedule=schedule, **settings), sequence_length=16)
    return found


def rates(of: PhaseSpec) -> list[float]:
    extent = Extent(steps=of.steps, tokens=of.tokens)
    return [learning_rate(step, extent=extent, schedule=of.schedule) for step in range(of.steps)]


def schedules() -> st.SearchStrategy[Schedule]:
    return st.builds(
        Schedule,
        shape=st.sampled_from(["cosine", "linear", "wsd", "constant", "adaptive"]),
        warmup_steps=st.one_of(st.none(), st.integers(0, 12)),
        decay_share=st.sampled_from([0.2, 0.5]),
        restarts=st.lists(st.integers(1, 60), max_size=2, unique=True).map(lambda found: tuple(sorted(found))),
    )


@given(schedule=schedules(), steps=st.integers(20, 80), others=st.integers(20, 80))
def test_what_counts_as_common_has_the_same_rates_in_both(schedule: Schedule, steps: int, others: int) -> None:
    one, other = phase(steps, schedule), phase(others, schedule)
    common = common_steps(one, other)
    assert rates(one)[:common] == rates(other)[:common]
    # It is no less than it must be: the next step differs, where there is one in both and warm-ups are the same.
    same_warmups = schedule.warmup_steps is not None
    if same_warmups and common < min(steps, others) and schedule.shape != "wsd":
        assume(schedule.final_lr_ratio < 1)
        assert rates(one)[: common + 1] != rates(other)[: common + 1]


def test_a_wsd_phase_is_the_same_up_to_the_earlier_decay() -> None:
    schedule = Schedule(shape="wsd", warmup_steps=5, decay_share=0.2)
    one, other = phase(100, schedule), phase(200, schedule)
    assert one.stable_steps == 80
    assert common_steps(one, other) == common_steps(other, one) == 80
    assert rates(one)[80] != rates(other)[80]


def test_shares_that_move_with_the_steps_have_nothing_in_common() -> None:
    constant = Schedule(shape="constant", warmup_steps=0)
    moving = (Share(source="notes", weight=1.0, end_weight=0.0), Share(source="code"))
    one, other = (phase(steps, constant, mixture=moving) for steps in (10, 20))
    assert common_steps(one, other) == 0
    assert common_steps(one, one) == 10


def test_names_do_not_tell_phases_apart_and_a_warm_up_counts_by_its_steps() -> None:
    implied, written = phase(50, Schedule()), phase(50, Schedule(warmup_steps=5))
    assert same_phase(implied, dataclasses.replace(written, name="first"))
    assert not same_phase(implied, phase(60, Schedule()))
    assert same_but_steps(implied, phase(60, Schedule()))
    assert not same_but_steps(implied, phase(50, Schedule(peak_lr=1.0)))
