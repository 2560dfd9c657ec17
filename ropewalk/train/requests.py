"""What signals and hooks ask a run to do; every rank acts on it between the same two steps."""

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
"""What schedulers send before they take a machine away; Slurm sends the second when `--signal=USR1@120` asks for it."""


class Interrupt:
    """While entered, the first signal is noted: a step ends before the process does. A second Ctrl-C interrupts at
    once; schedulers repeat theirs, which changes nothing. Only in the main thread."""

    def __init__(self) -> None:
        self.asked = False
        """Whether the process is asked to end."""
        self.preempted_at: float | None = None
        """When a scheduler asked, by `time.monotonic`; None after Ctrl-C, or before any signal."""
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
    """What is asked for; 0 for what is not."""

    interrupt: int = 0
    stop: int = 0
    save: int = 0
    rollback: int = 0
    """The step that went wrong."""


class RequestExchange:
    """Requests of any rank reach all of them one step later, at the same step: a signal comes to one rank, and a rank
    that stopped by itself would leave the others waiting."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._in_flight: Pending | None = None
        self._drops_rollback = False

    def drop_rollback(self) -> None:
        """The run has just returned to its newest checkpoint: a request for that in flight is out of date. All ranks
        must call, between the same two exchanges."""
        self._drops_rollback = self._in_flight is not None

    def exchange(self, own: Requests) -> Requests:
        """Sends this rank's requests; those of all ranks at the last call. One rank alone gets its own at once. All
        ranks must call, every step."""
        if self._group.size == 1:
            return own
        heard = Requests(*map(int, self._in_flight.wait().tolist())) if self._in_flight else Requests()
        if self._drops_rollback:
            heard.rollback, self._drops_rollback = 0, False
        wishes = torch.tensor([own.interrupt, own.stop, own.save, own.rollback])
        self._in_flight = self._group.start_all_reduce(wishes, operation="max")
        return heard
