"""Hang detection: per-rank heartbeats and a timeout. Stragglers among ranks.

A hang raises no error: a collective waits for a rank that is gone, a read for a disk. A thread watches the time of the
last step; when that is too long ago, it writes the stack of every thread and an event, and ends the process with its
own exit status, so that a launcher restarts it from the last checkpoint.
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
"""Exit status of a process that ended itself because it hung."""
FOLDER = "heartbeats"
MEMORY = 50
"""Steps that the median looks back on."""
BEAT_EVERY_S = 1.0
"""A heartbeat is written at most so often: the file tells people and launchers, who look every few seconds."""


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
        pauses = activity in ("probe", "validate", "save", "restore", "leave")
        return self.paused() if pauses else contextlib.nullcontext()

    def start(self) -> None:
        if self._settings.hang_s:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def beat(self, step: int) -> None:
        """A step is done."""
        now = self._clock()
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last, self._step = now, step
        if now - self._written >= BEAT_EVERY_S:
            self._written = now
            self._write_heartbeat()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in the block may last as long as it likes: validation, saving, restoring."""
        self._pauses += 1
        try:
            yield
        finally:
            if self._last is not None:
                self._last = self._clock()
            self._pauses -= 1

    @property
    def limit_s(self) -> float:
        """Seconds without a step that are too many."""
        usual = median(self._steps) if self._steps else 0.0
        return max(self._settings.hang_s, self._settings.hang_steps * usual)

    def is_hanging(self) -> bool:
        """Whether the last step is too long ago. Nothing hangs before the first, which may compile."""
        last = self._last
        return not self._pauses and last is not None and self._clock() - last > self.limit_s

    def forgive(self, seconds: float) -> None:
        """Time in which the whole process stood still (Ctrl-Z, a debugger) is no time without a step."""
        if self._last is not None:
            self._last += seconds

    def _watch(self) -> None:
        interval = min(1.0, self._settings.hang_s / 10)
        looked = self._clock()
        while not self._stop.wait(interval):
            now = self._clock()
            # This thread sleeps and nothing else: when it comes late, nobody ran.
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
        # A log of its own: whoever hangs may hold the lock of the other.
        with EventLog(self._run, rank=self._rank) as events:
            events.write("hang", step=self._step + 1, limit_s=self.limit_s, stacks=path.name)

    def _write_heartbeat(self) -> None:
        """Tells that this rank lives; in place of the last word, and never half of it."""
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
        # A full disk must not end training here; whoever looks sees an old heartbeat.
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            beside.write_text(json.dumps(told))
            os.replace(beside, path)


def heartbeat_path(run: Path, rank: int) -> Path:
    """Where a rank leaves its heartbeat."""
    return run / FOLDER / f"rank-{rank:05d}.json"


def stragglers(busy_seconds: Mapping[int, float], *, sigma: float = 4.0, least: float = 0.05) -> dict[int, float]:
    """The ranks that are busy `sigma` standard deviations longer than the median rank, and how many they are.

    The spread is 1.4826 times the median distance from the median, which equals the standard deviation of normal
    figures and is not widened by the stragglers themselves: among n ranks no plain z-score exceeds (n - 1) / sqrt(n).
    A rank is not named for a difference of less than a share `least` of the median.
    """
    if len(busy_seconds) < 3:
        return {}
    middle = median(busy_seconds.values())
    spread = max(1.4826 * median(abs(value - middle) for value in busy_seconds.values()), least * middle / sigma)
    scores = {rank: (value - middle) / spread for rank, value in busy_seconds.items() if spread}
    return {rank: score for rank, score in scores.items() if score > sigma}
