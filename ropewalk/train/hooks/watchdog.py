"""Hang detection: per-rank heartbeats and a timeout watchdog. Straggler detection.

A hang raises no error: a collective waits for a dead rank, a read for a disk. A thread checks the time since the last
step; after the timeout it writes all thread stacks and an event, and exits with its own status, so that a launcher
restarts the run from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ropewalk.base.events import EventLog

from ..config import Faults
from .hook import Activity, Hook

if TYPE_CHECKING:
    from ropewalk.parallel.executor import StepResult

    from ..training_run import TrainingRun

HANG = 70
"""Exit status after a hang."""
FOLDER = "heartbeats"
MEMORY = 50
"""Steps in the median step time."""
BEAT_EVERY_S = 1.0
"""Minimum seconds between heartbeat writes: people and launchers poll every few seconds."""


class Watchdog(Hook):
    """Watches the steps of this rank."""

    def __init__(
        self,
        run: Path,
        settings: Faults,
        *,
        rank: int = 0,
        end: Callable[[int], Any] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._settings, self._rank = run, settings, rank
        self._end, self._clock = end, clock
        self._steps: deque[float] = deque(maxlen=MEMORY)
        self._last: float | None = None
        self._step = 0
        self._written = -BEAT_EVERY_S
        self._pauses = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def before_training(self, run: TrainingRun) -> None:
        self.start()

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        self.beat(run.step)

    def during(self, run: TrainingRun, activity: Activity) -> contextlib.AbstractContextManager[None]:
        pauses = activity in ("probe", "validate", "evaluate", "save", "restore", "leave")
        return self.paused() if pauses else contextlib.nullcontext()

    def start(self) -> None:
        if self._settings.hang_s:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def beat(self, step: int) -> None:
        """Records a completed step."""
        now = self._clock()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last, self._step = now, step
        if now - self._written >= BEAT_EVERY_S:
            self._written = now
            self._write_heartbeat()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends the timeout in the block: validation, saving, restoring."""
        self._pauses += 1
        try:
            yield
        finally:
            if self._last is not None:
                self._last = self._clock()
            self._pauses -= 1

    @property
    def limit_s(self) -> float:
        """The timeout in seconds without a step."""
        usual = median(self._steps) if self._steps else 0.0
        return max(self._settings.hang_s, self._settings.hang_steps * usual)

    def is_hanging(self) -> bool:
        """Whether the timeout has passed since the last step. False before the first step, which may compile."""
        last = self._last
        return not self._pauses and last is not None and self._clock() - last > self.limit_s

    def forgive(self, seconds: float) -> None:
        """Excludes time in which the whole process was stopped (Ctrl-Z, a debugger)."""
        if self._last is not None:
            self._last += seconds

    def _watch(self) -> None:
        interval = min(1.0, self._settings.hang_s / 10)
        looked = self._clock()
        while not self._stop.wait(interval):
            now = self._clock()
            # This thread only sleeps: if it wakes late, the whole process was stopped.
            self.forgive(max(0.0, now - looked - 2 * interval))
            looked = now
            if self.is_hanging():
                self._leave_word()
                self._end(HANG)
                return

    def _leave_word(self) -> None:
        path = self._run / f"hang-rank-{self._rank:05d}.txt"
        with open(path, "a") as file:
            file.write(f"step {self._step + 1} hung for {self.limit_s:.0f} s; every thread stands here:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        # A separate log: the hanging thread may hold the lock of the other.
        with EventLog(self._run, rank=self._rank) as events:
            events.write("hang", step=self._step + 1, limit_s=self.limit_s, stacks=path.name)

    def _write_heartbeat(self) -> None:
        """Replaces the heartbeat file atomically."""
        path = heartbeat_path(self._run, self._rank)
        told = {
            "rank": self._rank,
            "step": self._step,
            "time": round(time.time(), 3),
            "step_s": median(self._steps) if self._steps else None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        beside = path.with_suffix(".partial")
        # A full disk must not end training here; the heartbeat just goes stale.
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            beside.write_text(json.dumps(told))
            os.replace(beside, path)


def heartbeat_path(run: Path, rank: int) -> Path:
    """The heartbeat file of a rank."""
    return run / FOLDER / f"rank-{rank:05d}.json"


def stragglers(busy_seconds: Mapping[int, float], *, sigma: float = 4.0, least: float = 0.05) -> dict[int, float]:
    """The ranks busy more than `sigma` standard deviations longer than the median rank, with their deviations.

    The standard deviation is estimated as 1.4826 times the median absolute deviation, which stragglers do not inflate:
    among n ranks no plain z-score exceeds (n - 1) / sqrt(n). Differences below a share `least` of the median are
    ignored.
    """
    if len(busy_seconds) < 3:
        return {}
    middle = median(busy_seconds.values())
    spread = max(1.4826 * median(abs(value - middle) for value in busy_seconds.values()), least * middle / sigma)
    scores = {rank: (value - middle) / spread for rank, value in busy_seconds.items() if spread}
    return {rank: score for rank, score in scores.items() if score > sigma}
