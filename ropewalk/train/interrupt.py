"""Ctrl-C and the request to make room wait for the end of the step, so that nothing trained is lost."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

PREEMPTION = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send before they take a machine away; Slurm sends the second when `--signal=USR1@120` asks for it."""


class Interrupt:
    """While entered, the first signal is noted. A second Ctrl-C interrupts at once; schedulers send theirs again and
    again, which changes nothing. Only in the main thread."""

    def __init__(self) -> None:
        self.asked = False
        """Whether somebody wants us to end."""
        self.preempted_at: float | None = None
        """When a scheduler asked, by `time.monotonic`; None when it was Ctrl-C, or nobody."""
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
