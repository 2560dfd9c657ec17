"""Worker processes that answer requests; one that dies is replaced, and what it had not answered is asked again.

One thread does all of it: it starts workers when there is something to do, hands requests out in the order they came,
and collects replies. Everybody else only puts requests in the queue. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import selectors
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle

from ropewalk.base.errors import UserError

from .shared import Shared
from .worker import READY, Decode, Failed, Map, Measure, Reply

DEPTH = 2
"""Requests a worker has at once: with one it would wait for the next."""
ATTEMPTS = 2
"""Workers that may die of a request before it is given up."""

# Not `multiprocessing`: its workers import the script that runs, and with it torch, three seconds and 300 MB each.
# Ctrl-C reaches every process of the terminal: it is for the parent to decide, which closes the socket.
_PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = {path!r}
from ropewalk.load.media.worker import main
main({descriptor})
"""

_log = logging.getLogger(__name__)


class WorkerDied(Exception):
    """Every worker that was given a request ended while it worked on it."""


@dataclass(slots=True)
class _Task:
    request: bytes
    memories: Sequence[Shared]
    future: Future[Reply]
    deaths: int = 0


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Connection
    ready: bool = False
    mapped: set[int] = field(default_factory=set)
    tasks: deque[_Task] = field(default_factory=deque)
    """Asked and not answered, in order: the first is what it works on."""


class Team:
    """Up to `count` workers. Safe to ask from several threads."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: deque[_Task] = deque()
        self._workers: list[_Worker] = []
        self._known: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()
        self._failed_starts = 0
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="collect", daemon=True)
        self._thread.start()

    def ask(self, request: Measure | Decode, *, memories: Sequence[Shared] = ()) -> Future[Reply]:
        """The reply to a request that speaks of `memories`; callbacks of the future run in the thread of the team and
        must be short. WorkerDied when workers end of it."""
        if self._closed:
            raise CancelledError
        task = _Task(pickle.dumps(request, pickle.HIGHEST_PROTOCOL), memories, Future())
        self._queue.append(task)
        self._wake.send(b"!")
        return task.future

    @property
    def processes(self) -> list[int]:
        """Numbers of the processes that run."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Ends the processes at once: they hold nothing that could be lost. What was asked is cancelled."""
        self._closed = True
        with contextlib.suppress(OSError):  # its reader ends by itself after a failure
            self._wake.send(b"!")
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select():
                    if key.data is None:
                        self._woken.recv(4096)
                    else:
                        self._receive(key.data)
                self._hand_out()
            self._finish(CancelledError())
        except BaseException as error:
            # No process can be started, or a mistake of ours: it belongs to those who wait.
            self._finish(error)

    def _finish(self, error: BaseException) -> None:
        self._closed = True
        for worker in [*self._workers]:
            self._end(worker)
            self._queue.extend(worker.tasks)
        self._selector.close()
        self._woken.close()
        _fail(self._queue, error)

    def _hand_out(self) -> None:
        while self._queue and not self._closed:
            worker = min(self._workers, key=lambda worker: len(worker.tasks), default=None)
            if (worker is None or worker.tasks) and len(self._workers) < self._count:
                worker = self._started()
            if worker is None or len(worker.tasks) >= DEPTH:
                return
            self._send(worker, self._queue.popleft())

    def _send(self, worker: _Worker, task: _Task) -> None:
        worker.tasks.append(task)
        # A worker that has died is noticed when its end of the socket is read.
        with contextlib.suppress(ConnectionError):
            for memory in task.memories:
                if memory.number not in worker.mapped:
                    self._show(worker, memory)
            worker.channel.send_bytes(task.request)

    def _show(self, worker: _Worker, memory: Shared) -> None:
        """Gives a worker some memory, and takes from it what nobody holds any more."""
        self._known[memory.number] = memory
        forgotten = tuple(number for number in worker.mapped if number not in self._known)
        worker.mapped.difference_update(forgotten)
        worker.mapped.add(memory.number)
        worker.channel.send(Map(memory.number, memory.size, forgotten))
        send_handle(worker.channel, memory.descriptor, worker.process.pid)

    def _receive(self, worker: _Worker) -> None:
        try:
            reply = worker.channel.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if reply == READY:
            worker.ready, self._failed_starts = True, 0
            return
        future = worker.tasks.popleft().future
        if isinstance(reply, Failed):
            future.set_exception(RuntimeError(f"a worker process failed:\n{reply.trace}"))
        else:
            future.set_result(reply)

    def _bury(self, worker: _Worker) -> None:
        """What a dead worker had not answered is asked again, first of all; what it died of, not for ever."""
        status = self._end(worker)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts > self._count + ATTEMPTS:
                self._give_up(worker, status)
                return
        _log.warning("a worker process that decodes ended with status %s; another takes its place", status)
        if worker.ready and worker.tasks:
            worker.tasks[0].deaths += 1
            if worker.tasks[0].deaths >= ATTEMPTS:
                worker.tasks.popleft().future.set_exception(WorkerDied(f"status {status}"))
        self._queue.extendleft(reversed(worker.tasks))

    def _give_up(self, worker: _Worker, status: int) -> None:
        error = UserError(
            f"worker processes that decode images end as they start (status {status}), for what their output above "
            'says or for want of memory; try fewer `threads`, or `workers = "threads"`, in load.media'
        )
        _fail([*worker.tasks, *self._queue], error)
        self._queue.clear()

    def _started(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
            process = subprocess.Popen(
                [sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        worker = _Worker(process, Connection(ours.detach()))
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        self._workers.append(worker)
        return worker

    def _end(self, worker: _Worker) -> int:
        """Its exit status."""
        self._selector.unregister(worker.channel)
        self._workers.remove(worker)
        worker.channel.close()
        worker.process.kill()
        return worker.process.wait()


def _fail(tasks: Iterable[_Task], error: BaseException) -> None:
    for task in tasks:
        task.future.set_exception(error)
