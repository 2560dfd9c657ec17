"""Tasks over worker processes, or in this process when there is one worker: the same results."""

from __future__ import annotations

import concurrent.futures as futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from types import TracebackType
from typing import TypeVar

from ropewalk.base.errors import UserError

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """`with Workers(4) as workers: workers.map(function, tasks)`; processes start with the first task."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: futures.ProcessPoolExecutor | None = None

    def map(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Results as they are ready, in any order. The first error stops what has not begun."""
        if self._processes == 1 or not tasks:
            yield from map(function, tasks)
            return
        pending = [self._started().submit(function, task) for task in tasks]
        try:
            for future in futures.as_completed(pending):
                yield future.result()
        except futures.process.BrokenProcessPool:
            raise UserError(
                "a worker process of prepare ended before its task, most likely for want of memory; what is done "
                "is kept: run the same command again with fewer `prepare.workers`. (A script that calls prepare "
                'must do so under `if __name__ == "__main__":`, because workers import it.)'
            ) from None
        finally:
            for future in pending:
                future.cancel()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _started(self) -> futures.ProcessPoolExecutor:
        if self._pool is None:
            # spawn: a fork copies locks of threads that do not exist in the child.
            context = multiprocessing.get_context("spawn")
            self._pool = futures.ProcessPoolExecutor(self._processes, mp_context=context, initializer=_begin)
        return self._pool


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    # Parallelism is over chunks: without this every worker would start one thread a core.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches every process of the terminal: the parent decides, a worker commits its chunk.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed waits for tasks forever, unless it looks."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
