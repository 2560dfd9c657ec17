"""Fully resolved phases of a run, and how many steps two versions of a phase share. No torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ropewalk.base.seeds import seed_for
from ropewalk.model.config import Lora

from .config import BatchRamp, LengthRamp, Phase, Schedule, Share, Train
from .lr_schedule import steady_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSpec:
    """One fully resolved phase."""

    index: int
    name: str
    steps: int
    start_from: str
    sequence_length: int
    batch_size: int
    batch_ramp: BatchRamp | None
    length_ramp: LengthRamp | None
    schedule: Schedule
    mixture: tuple[Share, ...]
    frozen: tuple[str, ...]
    lora: Lora | None
    fresh_moments: bool

    def rows(self, step: int) -> int:
        """Full sequences in step `step` of the phase."""
        return self.batch_ramp.rows(step, self.batch_size) if self.batch_ramp else self.batch_size

    def length(self, step: int) -> int:
        """Tokens per sequence in step `step` of the phase."""
        return self.length_ramp.length(step, self.sequence_length) if self.length_ramp else self.sequence_length

    @property
    def stable_steps(self) -> int | None:
        """Steps before the last decay of `wsd`; that checkpoint is kept so that a longer run can continue from it.
        None for other schedules."""
        if self.schedule.shape != "wsd":
            return None
        begin, steps = self.schedule.cycles(self.steps)[-1]
        stable = steady_steps(self.schedule, steps, self.schedule.warmup(steps))
        return begin + stable if stable else None

    def tokens(self, steps: int) -> int:
        """Tokens in the first `steps` steps."""
        return _rows_before(self.batch_ramp, self.batch_size, steps) * self.sequence_length

    def seed(self, run: int) -> int:
        """The seed of data order and dropout in this phase."""
        return seed_for(run, "phase", self.index) if self.index else run


def phases_of(train: Train, *, sequence_length: int) -> tuple[PhaseSpec, ...]:
    """The phases of a run; `sequence_length` is the default of phases without their own."""
    phases = train.phases or (Phase(steps=train.total_steps),)
    return tuple(_decided(phase, index, train, sequence_length) for index, phase in enumerate(phases))


def length_problems(train: Train, *, sequence_length: int) -> Iterator[tuple[str, str]]:
    """(key below `[train]`, problem and remedy) of length ramps that do not fit the sequence length."""
    for phase in phases_of(train, sequence_length=sequence_length):
        ramp, full = phase.length_ramp, phase.sequence_length
        times = full // ramp.from_length if ramp else 1
        if ramp and (ramp.from_length * times != full or times & (times - 1)):
            own = train.phases and train.phases[phase.index].length_ramp
            halves = ", ".join(str(full >> n) for n in range(1, 4) if full % (1 << n) == 0)
            yield (
                f"phases.{phase.index}.length_ramp.from_length" if own else "length_ramp.from_length",
                f"{ramp.from_length} does not double to the {full} tokens of a full row; choose of {halves}",
            )


def same_phase(one: PhaseSpec, other: PhaseSpec) -> bool:
    """Whether two phases train identically; names are ignored."""
    return same_but_steps(one, other) and _cycles(one) == _cycles(other)


def same_but_steps(one: PhaseSpec, other: PhaseSpec) -> bool:
    """Whether two phases differ only in steps, cycles and the warm-up derived from them."""
    return _kind(one) == _kind(other)


def common_steps(one: PhaseSpec, other: PhaseSpec) -> int:
    """The number of initial steps in which two phases train identically."""
    if same_phase(one, other):
        return one.steps
    if not same_but_steps(one, other) or any(share.end_weight is not None for share in (*one.mixture, *other.mixture)):
        return 0  # mixture weights that change linearly differ from the first step on
    common = 0
    for (begin, steps, warmup), (_, others, others_warmup) in zip(_cycles(one), _cycles(other), strict=False):
        if warmup != others_warmup:
            break
        common = begin + min(steady_steps(one.schedule, steps, warmup), steady_steps(one.schedule, others, warmup))
        if steps != others:
            break
        common = begin + steps
    return common


def _decided(phase: Phase, index: int, train: Train, sequence_length: int) -> PhaseSpec:
    # The run's ramps and start apply to the first phase only; later phases set their own.
    first = index == 0
    return PhaseSpec(
        index=index,
        name=phase.name or str(index + 1),
        steps=phase.steps,
        start_from=phase.start_from or (train.start_from if first else ""),
        sequence_length=phase.sequence_length or sequence_length,
        batch_size=phase.batch_size or train.batch_size,
        batch_ramp=phase.batch_ramp or (train.batch_ramp if first else None),
        length_ramp=phase.length_ramp or (train.length_ramp if first else None),
        schedule=phase.schedule or train.schedule,
        mixture=phase.mixture or train.mixture,
        frozen=train.frozen if phase.frozen is None else phase.frozen,
        lora=phase.lora or train.lora,
        fresh_moments=phase.moments == "fresh" or bool(phase.start_from),
    )


def _rows_before(ramp: BatchRamp | None, batch_size: int, steps: int) -> int:
    if ramp is None:
        return steps * batch_size
    ramped = _ramped_rows(ramp, batch_size)
    inside = min(steps, ramp.over_steps)
    return ramped[inside] + (steps - inside) * batch_size


@functools.lru_cache(maxsize=16)
def _ramped_rows(ramp: BatchRamp, batch_size: int) -> tuple[int, ...]:
    """Cumulative sequences after 0, 1, ... `over_steps` steps."""
    sums = [0]
    for step in range(ramp.over_steps):
        sums.append(sums[-1] + ramp.rows(step, batch_size))
    return tuple(sums)


def _kind(phase: PhaseSpec) -> PhaseSpec:
    """A phase without its steps and without its mixture, which may change at any step."""
    schedule = dataclasses.replace(phase.schedule, warmup_steps=None, restarts=())
    return dataclasses.replace(phase, name="", steps=0, mixture=(), schedule=schedule)


def _cycles(phase: PhaseSpec) -> list[tuple[int, int, int]]:
    """First step, steps and warm-up of each cycle."""
    schedule = phase.schedule
    return [(begin, steps, schedule.warmup(steps)) for begin, steps in schedule.cycles(phase.steps)]
