"""Requests of signals and hooks to stop, save or roll back; all ranks act on them between the same two steps."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from ropewalk.parallel.comm import Group, Pending

PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before preemption; Slurm sends the second with `--signal=USR1@120`."""


class Interrupt:
    """Defers the first signal to the end of the step. A second Ctrl-C interrupts at once; repeated scheduler signals
    are ignored. Main thread only."""

    def __init__(self) -> None:
        self.asked = False
        """Whether a signal arrived."""
        self.preempted_at: float | None = None
        """Time of the scheduler's signal (`time.monotonic`); None after Ctrl-C or without a signal."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT, *PREEMPTION)
            self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in PREEMPTION and self.asked:
            raise KeyboardInterrupt
        if number in PREEMPTION and not self.asked:
            self.preempted_at = time.monotonic()
        self.asked = True


@dataclass(slots=True)
class Requests:
    """The requested actions; 0: not requested."""

    interrupt: int = 0
    stop: int = 0
    save: int = 0
    rollback: int = 0
    """The step to roll back from."""


class RequestExchange:
    """Shares requests with all ranks, which receive them one step later at the same step: a signal may reach only one
    rank, and a rank that stops alone would leave the others hanging in a collective."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._in_flight: Pending | None = None
        self._drops_rollback = False

    def drop_rollback(self) -> None:
        """Discards a rollback request in flight, because the run has just rolled back. All ranks must call, between
        the same two exchanges."""
        self._drops_rollback = self._in_flight is not None

    def exchange(self, own: Requests) -> Requests:
        """Sends this rank's requests and returns those of all ranks from the last call; a single rank gets its own at
        once. All ranks must call, every step."""
        if self._group.size == 1:
            return own
        heard = Requests(*map(int, self._in_flight.wait().tolist())) if self._in_flight else Requests()
        if self._drops_rollback:
            heard.rollback, self._drops_rollback = 0, False
        wishes = torch.tensor([own.interrupt, own.stop, own.save, own.rollback])
        self._in_flight = self._group.start_all_reduce(wishes, operation="max")
        return heard
