"""Work as a graph of tasks: each runs once what it follows is done, on a few threads, in bounded memory. No torch.

A save is such a graph, of small tasks per chunk (DeepFreeze, Nicolae et al. 2020): while one chunk is packed another is
written, and a file is synced while the next is begun. What the tasks make does not depend on the number of threads:
wherever order matters, one task follows the other.
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
"""A third of the share of a thread that trains, where both want the same core; all of a core that nobody else wants.
At 10 or 19 a save on a machine that others use too would hardly get on."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SaveTask:
    """One piece of work."""

    number: int
    """Its place in the graph: of tasks that could run, the one that was added first does."""
    kind: str
    """What it does, for the account of seconds: `pack`, `write`."""
    work: Callable[[], None]
    after: tuple[SaveTask | Future[Any], ...]
    holds: int
    """Bytes of memory that it makes: held from its start until the tasks that follow it are done."""


class TaskGraph:
    """Tasks, each added after those that it follows, so that there are no cycles."""

    def __init__(self) -> None:
        self.tasks: list[SaveTask] = []

    def add(
        self, kind: str, work: Callable[[], None], *, after: Sequence[SaveTask | Future[Any]] = (), holds: int = 0
    ) -> SaveTask:
        """A task that runs when `after` is done: tasks of this graph, or something that happens elsewhere."""
        task = SaveTask(number=len(self.tasks), kind=kind, work=work, after=tuple(dict.fromkeys(after)), holds=holds)
        self.tasks.append(task)
        return task


def run_graph(graph: TaskGraph, *, threads: int = 1, memory_bytes: int) -> dict[str, float]:
    """Runs every task once and returns the seconds spent in each kind; the calling thread is one of `threads`.

    Tasks that hold memory start in the order in which they were added, and only while all that is held stays within
    `memory_bytes`; one that does not fit starts alone, when nothing else could. The first error, of a task or of
    something that a task waits for, keeps all others from starting; it is raised when those under way have ended.
    """
    it = _Run(graph, memory_bytes)
    # Threads inherit the priority of the one that makes them: helpers of a thread that gives way give way too.
    helpers = [threading.Thread(target=it.work, name="save", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    it.work()
    for helper in helpers:
        helper.join()
    if it.error:
        raise it.error
    return it.seconds


def lower_priority() -> None:
    """Lowers the priority of the calling thread for good. Only Linux has priorities by thread; elsewhere nothing."""
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
        """How much each task still waits for."""
        self._users = {task: 0 for task in graph.tasks}
        """How many followers of each are not done."""
        for task in graph.tasks:
            for before in task.after:
                self._followers.setdefault(before, []).append(task)
                if isinstance(before, SaveTask):
                    self._users[before] += 1
        self._light = [(task.number, task) for task in graph.tasks if not task.holds and not task.after]
        """Heap of those that could run at once."""
        self._heavy = [task for task in reversed(graph.tasks) if task.holds]
        """Those that hold memory and have not started, the next one last."""
        self._left, self._under_way = len(graph.tasks), 0
        for before in [before for before in self._followers if isinstance(before, Future)]:
            before.add_done_callback(self._happened)

    def work(self) -> None:
        """What each thread does until nothing is left."""
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
                    self._under_way += 1
                    self._held += task.holds
                    return task
                self._changed.wait()
            return None

    def _choose(self) -> SaveTask | None:
        """Takes the first task that may start."""
        heavy = self._heavy[-1] if self._heavy and not self._missing[self._heavy[-1]] else None
        fits = heavy is not None and self._held + heavy.holds <= self._memory_bytes
        light = self._light[0][1] if self._light else None
        if heavy and light is None and not self._under_way:
            fits = True  # nothing else will make room
        if heavy and fits and (light is None or heavy.number < light.number):
            return self._heavy.pop()
        return heapq.heappop(self._light)[1] if light else None

    def _end(self, task: SaveTask, error: BaseException | None, seconds: float) -> None:
        with self._changed:
            self._left -= 1
            self._under_way -= 1
            self.seconds[task.kind] = self.seconds.get(task.kind, 0.0) + seconds
            self.error = self.error or error
            for made in (task, *task.after):
                if isinstance(made, SaveTask):
                    self._users[made] -= made is not task
                    self._held -= made.holds if not self._users[made] else 0
            self._release(task)

    def _happened(self, before: Future[Any]) -> None:
        """Something that happens elsewhere is done; from any thread."""
        with self._changed:
            self.error = self.error or before.exception()
            self._release(before)

    def _release(self, before: SaveTask | Future[Any]) -> None:
        for task in self._followers.get(before, ()):
            self._missing[task] -= 1
            if not self._missing[task] and not task.holds:
                heapq.heappush(self._light, (task.number, task))
        self._changed.notify_all()
