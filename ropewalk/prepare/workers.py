"""Tasks over worker processes, or in this process when there is one worker: the same results."""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import pyarrow as pa

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Progress, amount

Task = TypeVar("Task")
Result = TypeVar("Result")


class Sized(Protocol):
    """A task that knows its size in bytes and the files that it commits; one whose files are there is done."""

    @property
    def bytes(self) -> int: ...
    @property
    def made(self) -> tuple[Path, ...]: ...


SizedTask = TypeVar("SizedTask", bound=Sized)


class Workers:
    """`with Workers(4) as workers: workers.map(function, tasks)`; processes start with the first task."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.made: set[Path] = set()
        """What the tasks that were run have made, now or earlier."""
        self._pool: futures.ProcessPoolExecutor | None = None

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Results as they are ready, in any order. The first error stops what has not begun."""
        if self.processes == 1 or not tasks:
            yield from map(function, tasks)
            return
        pending = self._submitted(function, tasks)
        try:
            with _told():
                for future in futures.as_completed(pending):
                    yield future.result()
        finally:
            for future in pending:
                future.cancel()

    def start(self, function: Callable[[Task], object], tasks: Sequence[Task]) -> Callable[[], None]:
        """Has the tasks done beside whatever follows; the function that it gives waits for them.

        In one process nothing would be gained, and nothing is done.
        """
        if self.processes == 1:
            return lambda: None
        begun = self._submitted(function, tasks)
        return lambda: _wait(begun)

    def run(
        self, title: str, function: Callable[[SizedTask], int], tasks: Sequence[SizedTask], *, progress: Progress
    ) -> None:
        """Does the tasks that are not done; `function` commits one and gives the number of its documents."""
        self.made.update(path for task in tasks for path in task.made)
        ahead = [task for task in tasks if not all(path.exists() for path in task.made)]
        total = sum(task.bytes for task in tasks)
        first = done = total - sum(task.bytes for task in ahead)
        documents, start = 0, time.monotonic()
        progress.begin(title, total, "B")
        progress.advance(done)
        for size, count in self.map(functools.partial(_sized, function), ahead):
            done, documents = done + size, documents + count
            progress.advance(done, _pace(documents, done - first, time.monotonic() - start))
        spent = time.monotonic() - start
        kept = f", {amount(first, 'B')} kept" if first else ""
        progress.end(f"{amount(total, 'B')}{kept}  {_pace(documents, done - first, spent)}".rstrip())

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _submitted(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> list[futures.Future[Result]]:
        with _told():  # a worker may have died since the last task
            return [self._started().submit(function, task) for task in tasks]

    def _started(self) -> futures.ProcessPoolExecutor:
        if self._pool is None:
            # spawn: a fork copies locks of threads that do not exist in the child.
            context = multiprocessing.get_context("spawn")
            self._pool = futures.ProcessPoolExecutor(self.processes, mp_context=context, initializer=_begin)
        return self._pool


def _wait(begun: Sequence[futures.Future[Result]]) -> None:
    with _told():
        for future in begun:
            future.result()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A worker that died is reported in the user's words."""
    try:
        yield
    except futures.process.BrokenProcessPool:
        raise UserError(
            "a worker process of prepare ended before its task, most likely for want of memory; what is done "
            "is kept: run the same command again with fewer `prepare.workers`. (A script that calls prepare "
            'must do so under `if __name__ == "__main__":`, because workers import it.)'
        ) from None


def _sized(function: Callable[[SizedTask], int], task: SizedTask) -> tuple[int, int]:
    return task.bytes, function(task)


def _pace(documents: int, size: int, seconds: float) -> str:
    if not documents or seconds <= 0:
        return ""
    return f"{amount(documents / seconds, 'documents')}/s  {amount(size / seconds, 'B')}/s"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    # Parallelism is over chunks: without this every worker would start one thread a core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    pa.set_cpu_count(1)
    # Ctrl-C reaches every process of the terminal: the parent decides, a worker commits its chunk.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed waits for tasks forever, unless it looks."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
