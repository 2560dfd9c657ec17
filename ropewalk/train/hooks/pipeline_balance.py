"""Checks pipeline load balance: compares measured stage times at checkpoints and proposes a better layer split.

Stages are initially balanced by FLOPs (plan/stage_split.py). With `parallel.resplit` a better split is written to
`plan.json` and used when the run continues: checkpoints hold whole tensors, so each rank reads its new layers.

Runs without a resplit are bitwise reproducible; a resplit changes the summation order of the gradient norm, which is
why it is opt-in. Memory is not checked: a stage that gains layers needs room for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ropewalk.base.events import EventLog
from ropewalk.parallel.comm import Group
from ropewalk.parallel.executor import Executor
from ropewalk.plan.plan import Planned, save_plan
from ropewalk.plan.stage_split import Split, resplit

from .hook import Hook

if TYPE_CHECKING:
    from ropewalk.checkpoint.run_state import State

    from ..training_run import TrainingRun

LEAST_STEPS = 5
"""Minimum steps to measure before comparing."""


class PipelineBalance(Hook):
    """Compares the pipeline stages of each phase at checkpoints; `say` is set on the reporting rank only."""

    def __init__(
        self, run: Path, planned: Planned, control: Group, *, events: EventLog, say: Callable[[str], None] | None
    ) -> None:
        self._run, self._planned, self._control, self._events, self._say = run, planned, control, events, say
        self._seen: tuple[Executor | None, int] = (None, 0)
        self._proposed: Split = ()

    def on_save(self, run: TrainingRun, state: State) -> None:
        self.look(run.executor, phase=state.phase, step=state.step)

    def look(self, executor: Executor, *, phase: int, step: int) -> None:
        """Compares stages over the steps since the last call, if there are enough. All ranks must call, at the same
        steps."""
        planned = self._planned.phases[phase]
        if planned.plan.pipeline == 1:
            return
        known, since = self._seen
        if known is not executor or step < since:
            # Earlier steps belong to another phase, were rolled back, or warmed up.
            executor.stage_seconds()
            self._seen = (executor, step)
            return
        if step - since < LEAST_STEPS:
            return
        self._seen = (executor, step)
        mine, stages = executor.stage_seconds(), planned.plan.stages
        taken = torch.tensor([mine.get(stage, 0.0) for stage in range(len(stages))], dtype=torch.float64)
        # The slowest rank of a stage and its replicas counts: the others wait for it.
        seconds = self._control.all_reduce(taken, operation="max").tolist()
        better = resplit(planned.spec, stages, seconds=seconds) if min(seconds) > 0 else stages
        if self._say and better not in (stages, self._proposed):
            self._proposed = better
            self._propose(better, phase=phase, step=step, step_seconds=[each / (step - since) for each in seconds])

    def _propose(self, better: Split, *, phase: int, step: int, step_seconds: Sequence[float]) -> None:
        assert self._say
        plan = self._planned.phases[phase].plan
        now, then = [len(layers) for layers in plan.stages], [len(layers) for layers in better]
        self._events.write(
            "stages_resplit", step=step, phase=phase, layers=now, better=then, seconds=step_seconds, kept=plan.resplit
        )
        if plan.resplit:
            save_plan(self._run, _with_stages(self._planned, plan.stages, better))
        remedy = "takes effect when the run continues" if plan.resplit else "`parallel.resplit = true` does that"
        self._say(
            f"step {step}: stages of {_sum(now)} layers take {', '.join(f'{s * 1e3:.3g}' for s in step_seconds)} ms a "
            f"step and would be better cut as {_sum(then)}: {remedy}"
        )


def _with_stages(planned: Planned, before: Split, after: Split) -> Planned:
    """The plans with stages `after` in all phases with stages `before`."""
    phases = (
        dataclasses.replace(each, plan=dataclasses.replace(each.plan, stages=after))
        if each.plan.stages == before
        else each
        for each in planned.phases
    )
    return Planned(phases=tuple(phases))


def _sum(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))
