"""Reaction to steps that went wrong, as `train.guard` says: recorded, skipped, rolled back, or the end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ropewalk.base.errors import UserError
from ropewalk.parallel.anomaly_guard import ANOMALIES, OVERFLOW, SPIKE

from ..config import Guard
from .hook import Hook

if TYPE_CHECKING:
    from ..training_run import TrainingRun
    from .metrics import Meter

Action = Literal["record", "skip", "rollback", "stop"]


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A step that went wrong."""

    step: int
    """Steps that are complete with it."""
    what: str
    action: Action


class RollBack(Exception):
    """Training goes back to the newest checkpoint because of `anomaly`."""

    def __init__(self, anomaly: Anomaly) -> None:
        super().__init__(anomaly.what)
        self.anomaly = anomaly


class AnomalyGuard(Hook):
    """Looks at the steps since the last look whenever the device is synchronized, before anything is logged, validated
    or saved."""

    def __init__(self, guard: Guard, meter: Meter) -> None:
        self._policy, self._meter = Policy(guard), meter

    def before_step(self, run: TrainingRun) -> None:
        rejected = self._policy.left_out(run.step + 1)
        run.phase.data.loader.skip(run.phase.phase.rows(run.at.phase_step) * rejected)

    def on_sync(self, run: TrainingRun) -> None:
        for anomaly in self._policy.judge(self._meter.take_anomalies(), last_step=run.step):
            run.events.write("anomaly", step=anomaly.step, what=anomaly.what, action=anomaly.action)
            run.say(f"warning: step {anomaly.step}: {anomaly.what} ({anomaly.action})")
            for hook in run.hooks:
                hook.on_anomaly(run, anomaly)
            if anomaly.action == "stop" or self._policy.exhausted:
                raise UserError(diverged(anomaly.what, anomaly.step))
            if anomaly.action == "rollback":
                raise RollBack(anomaly)

    def before_rollback(self, run: TrainingRun, anomaly: Anomaly) -> None:
        times = self._policy.note_failure(anomaly.step)
        if times > self._policy.guard.max_consecutive:
            raise UserError(diverged(f"{anomaly.what}, in spite of {times - 1} rollbacks,", anomaly.step))

    def after_rollback(self, run: TrainingRun, anomaly: Anomaly) -> None:
        failed, rejected = anomaly.step, self._policy.left_out(anomaly.step)
        run.events.write("rolled_back", step=run.step, failed_step=failed, left_out=rejected)
        without = f" without {rejected} of its batches" if rejected else ""
        run.say(f"rolled back to step {run.step}; repeating step {failed}{without}")


def diverged(what: str, step: int) -> str:
    """The error that ends a run."""
    return (
        f"{what} at step {step}; no checkpoint holds broken weights, the same command continues from the last one. "
        "Lower `train.schedule.peak_lr`, lengthen `train.schedule.warmup_steps` or use `train.precision=fp32`; "
        "configure the reaction in `[train.guard]`"
    )


@dataclass(slots=True)
class Policy:
    """Decides about anomalies, and tells a passing fault from bad data.

    When a step fails for the first time, it is repeated: a flipped bit does not return, and the run equals one without
    it. When it fails again, its batch is skipped: the run equals one whose data never had it. None of this is saved: a
    restarted process comes to the same decisions.
    """

    guard: Guard
    in_a_row: int = 0
    """Steps skipped in a row."""
    _failures: dict[int, int] = field(default_factory=dict)

    def judge(self, codes: list[int], *, last_step: int) -> Iterator[Anomaly]:
        """The anomalies among steps with these `codes`, the last of which is `last_step`."""
        for step, code in enumerate(codes, last_step - len(codes) + 1):
            if not code:
                self.in_a_row = 0
                continue
            anomaly = Anomaly(step, ANOMALIES[code], self._action(code))
            self.in_a_row = 0 if anomaly.action == "record" else self.in_a_row + 1
            yield anomaly

    @property
    def exhausted(self) -> bool:
        """Whether more steps in a row went wrong than the guard allows."""
        return self.in_a_row > self.guard.max_consecutive

    def note_failure(self, step: int) -> int:
        """Remembers that the run goes back because of `step`; how often it has by now."""
        self.in_a_row = 0
        self._failures[step] = self._failures.get(step, 0) + 1
        return self._failures[step]

    def left_out(self, step: int) -> int:
        """Batches to leave out before the one of `step`."""
        return max(0, self._failures.get(step, 0) - 1)

    def _action(self, code: int) -> Action:
        if code == OVERFLOW:
            return "skip"
        if code == SPIKE:
            assert self.guard.spike != "off", "without a rule there are no spikes"
            return self.guard.spike
        return self.guard.not_finite
