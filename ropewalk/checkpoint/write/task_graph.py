"""Runs a graph of tasks on a few low-priority threads in bounded memory. No torch.

A save is a graph of small tasks per chunk (DeepFreeze, Nicolae et al. 2020): one chunk is compressed while another is
written, and one file is synced while the next is started. The result does not depend on the number of threads: where
order matters, tasks depend on each other.
"""

from __future__ import annotations

import heapq
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

NICE = 5
"""On a contended core, a third of the share of a training thread; all of an idle core. With 10 or 19, saves on a shared
machine would hardly progress."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SaveTask:
    """A task of a graph."""

    number: int
    """Order of creation: of the ready tasks, the first one runs."""
    kind: str
    """For the report of seconds, e.g. `pack`, `write`."""
    work: Callable[[], None]
    after: tuple[SaveTask | Future[Any], ...]
    holds: int
    """Bytes of memory from its start until its dependents are done."""


class TaskGraph:
    """Tasks; each is added after its dependencies, so there are no cycles."""

    def __init__(self) -> None:
        self.tasks: list[SaveTask] = []

    def add(
        self, kind: str, work: Callable[[], None], *, after: Sequence[SaveTask | Future[Any]] = (), holds: int = 0
    ) -> SaveTask:
        """Adds a task that runs after `after`: tasks of this graph, or futures completed elsewhere."""
        task = SaveTask(number=len(self.tasks), kind=kind, work=work, after=tuple(dict.fromkeys(after)), holds=holds)
        self.tasks.append(task)
        return task


def run_graph(graph: TaskGraph, *, threads: int = 1, memory_bytes: int) -> dict[str, float]:
    """Runs all tasks and returns the seconds per kind; the calling thread is one of `threads`.

    Tasks that hold memory start in order and within `memory_bytes` in total; a larger one starts when nothing else can.
    After the first error, of a task or a future, no task starts; it is raised when the running tasks have ended.
    """
    execution = _Run(graph, memory_bytes)
    # Threads inherit the priority of their creator: helpers of a low-priority thread have low priority.
    helpers = [threading.Thread(target=execution.work, name="save", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    execution.work()
    for helper in helpers:
        helper.join()
    if execution.error:
        raise execution.error
    return execution.seconds


def lower_priority() -> None:
    """Lowers the priority of the calling thread permanently. Linux only, which has priorities per thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


class _Run:
    def __init__(self, graph: TaskGraph, memory_bytes: int) -> None:
        self.seconds: dict[str, float] = {}
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self._memory_bytes, self._held = memory_bytes, 0
        self._followers: dict[SaveTask | Future[Any], list[SaveTask]] = {}
        self._missing = {task: len(task.after) for task in graph.tasks}
        """Number of open dependencies of each task."""
        self._users = {task: 0 for task in graph.tasks}
        """Number of unfinished dependents of each task."""
        for task in graph.tasks:
            for before in task.after:
                self._followers.setdefault(before, []).append(task)
                if isinstance(before, SaveTask):
                    self._users[before] += 1
        self._light = [(task.number, task) for task in graph.tasks if not task.holds and not task.after]
        """Heap of ready tasks without memory."""
        self._heavy = [task for task in reversed(graph.tasks) if task.holds]
        """Tasks with memory that have not started, next one last."""
        self._left, self._running = len(graph.tasks), 0
        for before in [before for before in self._followers if isinstance(before, Future)]:
            before.add_done_callback(self._completed)

    def work(self) -> None:
        """The loop of each thread."""
        while (task := self._next()) is not None:
            start, error = time.perf_counter(), None
            try:
                task.work()
            except BaseException as failure:  # raised by `run`
                error = failure
            self._end(task, error, time.perf_counter() - start)

    def _next(self) -> SaveTask | None:
        with self._changed:
            while self._left and not self.error:
                task = self._choose()
                if task:
                    self._running += 1
                    self._held += task.holds
                    return task
                self._changed.wait()
            return None

    def _choose(self) -> SaveTask | None:
        """Removes and returns the first task that may start."""
        heavy = self._heavy[-1] if self._heavy and not self._missing[self._heavy[-1]] else None
        fits = heavy is not None and self._held + heavy.holds <= self._memory_bytes
        light = self._light[0][1] if self._light else None
        if heavy and light is None and not self._running:
            fits = True  # no other task will free memory
        if heavy and fits and (light is None or heavy.number < light.number):
            return self._heavy.pop()
        return heapq.heappop(self._light)[1] if light else None

    def _end(self, task: SaveTask, error: BaseException | None, seconds: float) -> None:
        with self._changed:
            self._left -= 1
            self._running -= 1
            self.seconds[task.kind] = self.seconds.get(task.kind, 0.0) + seconds
            self.error = self.error or error
            for made in (task, *task.after):
                if isinstance(made, SaveTask):
                    self._users[made] -= made is not task
                    self._held -= made.holds if not self._users[made] else 0
            self._release(task)

    def _completed(self, before: Future[Any]) -> None:
        """Callback of futures; called from any thread."""
        with self._changed:
            self.error = self.error or before.exception()
            self._release(before)

    def _release(self, before: SaveTask | Future[Any]) -> None:
        for task in self._followers.get(before, ()):
            self._missing[task] -= 1
            if not self._missing[task] and not task.holds:
                heapq.heappush(self._light, (task.number, task))
        self._changed.notify_all()
