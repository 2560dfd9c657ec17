"""How far two versions of a phase do the same: what a run with more steps may keep of what it has trained. No torch."""

from __future__ import annotations

import dataclasses

from .lr_schedule import steady_steps
from .phase_spec import PhaseSpec


def same_phase(one: PhaseSpec, other: PhaseSpec) -> bool:
    """Whether two phases train the same, whatever they are called."""
    return same_but_steps(one, other) and _cycles(one) == _cycles(other)


def same_but_steps(one: PhaseSpec, other: PhaseSpec) -> bool:
    """Whether two phases differ at most in their steps and cycles, and in the warm-up that follows from these."""
    return _kind(one) == _kind(other)


def common_steps(one: PhaseSpec, other: PhaseSpec) -> int:
    """Steps from the beginning in which two phases train the same."""
    if same_phase(one, other):
        return one.steps
    if not same_but_steps(one, other) or any(share.end_weight is not None for share in (*one.mixture, *other.mixture)):
        return 0  # shares of sources that move with the steps are others from the first step on
    common = 0
    for (begin, steps, warmup), (_, others, others_warmup) in zip(_cycles(one), _cycles(other), strict=False):
        if warmup != others_warmup:
            break
        common = begin + min(steady_steps(one.schedule, steps, warmup), steady_steps(one.schedule, others, warmup))
        if steps != others:
            break
        common = begin + steps
    return common


def _kind(phase: PhaseSpec) -> PhaseSpec:
    """A phase without its steps, and without its mixture, which may change at any step."""
    schedule = dataclasses.replace(phase.schedule, warmup_steps=None, restarts=())
    return dataclasses.replace(phase, name="", steps=0, mixture=(), schedule=schedule)


def _cycles(phase: PhaseSpec) -> list[tuple[int, int, int]]:
    """First step, steps and warm-up of each cycle."""
    schedule = phase.schedule
    return [(begin, steps, schedule.warmup(steps)) for begin, steps in schedule.cycles(phase.steps)]
