"""What the run does about steps that went wrong: the policy of `train.guard`, applied when the host comes to look."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ropewalk.parallel.anomaly_guard import ANOMALIES, OVERFLOW, SPIKE

from ..config import Guard

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


@dataclass(slots=True)
class Policy:
    """Decides about anomalies, and remembers what it takes to tell a passing fault from bad data.

    The first time a step fails, the run repeats it: a flipped bit does not come back, and the run is that which never
    had it. When it fails again, its batch is left out: the run is that whose data never had it. Nothing of this is
    saved: a process that starts anew comes to the same decisions.
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
