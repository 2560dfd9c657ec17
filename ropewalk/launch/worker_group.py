"""Workers on this machine under torch elastic, which restarts all of them when one dies.

This process follows the files that workers write in the run directory: it shows the progress of rank 0, and ends the
group instead of restarting it after a failure that would recur (an invalid request, a full disk).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedCheckpoint, Preempted, UserError, WorkersFailed
from ropewalk.base.events import Event, events_path, parse_event
from ropewalk.base.progress import Progress
from ropewalk.base.relay import LOGS, PROGRESS, Tail, replay

from .worker import DetachedProcess, command, elastic_environment, guarded, log_of, start_detached, tail_of

AGENT_LOG, WORKER_LOG = "launcher.log", "rank-RANK.log"
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerGroup:
    """The workers of a run."""

    processes: int
    max_restarts: int = 3
    """Maximum restarts of the whole group."""
    grace_s: float = 30.0
    """Seconds for saving after a request to terminate."""
    worker: Sequence[str] | None = None
    """Command of each worker; None: train the run."""


def run_workers(run: Path, group: WorkerGroup, *, progress: Progress) -> None:
    """Runs the group in the directory `run` to completion; raises the error that ended it. The caller holds the lock of
    the run."""
    for _ in follow_workers(run, group, progress=progress):
        pass


def follow_workers(
    run: Path, group: WorkerGroup, *, progress: Progress, say: Callable[[str], None] | None = None
) -> Iterator[None]:
    """As `run_workers`, as a generator that yields after each update of `progress`; closing it ends the group. `say`
    receives messages of this process; by default, `progress` does.

    Ctrl-C and the signals of schedulers are forwarded once, so that the workers can save. A second Ctrl-C kills them.
    """
    files = _WorkerFiles(run, group.processes)
    with _agent(run, group) as agent, _forwarded_signals(agent) as preempted:
        interrupted = False
        while agent.poll() is None:
            try:
                time.sleep(LOOK_EVERY_S)
                files.read(progress)
                if files.failed:
                    agent.send_signal(signal.SIGTERM)
                    agent.wait()
                yield
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                (say or progress.say)("interrupted: waiting for the workers to save; Ctrl-C again kills them")
                agent.send_signal(signal.SIGINT)
        files.read(progress)
    if files.failed:
        damaged = files.failed["error"] == DamagedCheckpoint.__name__
        raise (DamagedCheckpoint if damaged else UserError)(files.failed["message"])
    # The agent also sends SIGTERM to the survivors before a restart.
    if preempted.is_set() and (files.preempted or agent.returncode):
        where = f"at step {files.preempted['step']}" if files.preempted else "before anything was trained"
        raise Preempted(f"preempted {where}; the same command continues")
    if interrupted:
        raise KeyboardInterrupt
    if agent.returncode:
        raise WorkersFailed(_failure_message(run, group, agent.returncode))


def start_group_detached(run: Path, group: WorkerGroup) -> DetachedProcess:
    """Starts `run_workers` in a process that outlives this one; its output goes to a log."""
    numbers = (str(group.processes), str(group.max_restarts), str(group.grace_s))
    return start_detached(run, [sys.executable, "-m", "ropewalk.launch", str(run), *numbers])


def agent_command(run: Path, group: WorkerGroup) -> list[str]:
    """The command of torch elastic's agent, which starts the workers."""
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(group.processes), "--max-restarts", str(group.max_restarts), "--no-python"),
        *guarded(run / LOGS / WORKER_LOG, group.worker or command(run)),
    ]
    return guarded(run / LOGS / AGENT_LOG, agent)


def worker_environment(group: WorkerGroup) -> dict[str, str]:
    """The environment of the workers; divides the cores between them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // group.processes)),
        **os.environ,
        **elastic_environment(group.grace_s),
    }


@contextlib.contextmanager
def _agent(run: Path, group: WorkerGroup) -> Iterator[subprocess.Popen[bytes]]:
    """The agent, in a new session, so that Ctrl-C reaches it only through this process. Killed with its workers at the
    end."""
    (run / LOGS).mkdir(parents=True, exist_ok=True)
    agent = subprocess.Popen(
        agent_command(run, group), env=worker_environment(group), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()


@contextlib.contextmanager
def _forwarded_signals(agent: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """Forwards preemption signals to the workers, once, and sets the event. Only the main thread receives signals."""
    preempted = threading.Event()

    def forward(number: int, frame: Any) -> None:
        if not preempted.is_set():
            preempted.set()
            agent.send_signal(signal.SIGTERM)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGUSR1) if is_main else ()
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield preempted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _WorkerFiles:
    """Follows the files that the workers write."""

    def __init__(self, run: Path, processes: int) -> None:
        self._progress = Tail(run / LOGS / PROGRESS)
        self._events = [Tail(events_path(run, rank=rank)) for rank in range(processes)]
        self.failed: Event | None = None
        """The first failure that would recur after a restart."""
        self.preempted: Event | None = None

    def read(self, progress: Progress) -> None:
        replay(self._progress.lines(), progress)
        for tail in self._events:
            for line in tail.lines():
                self._note(line)

    def _note(self, line: bytes) -> None:
        # Parses only the rare lines of these kinds.
        if b'"kind": "failed"' in line and not self.failed:
            self.failed = parse_event(line)
        elif b'"kind": "preempted"' in line:
            self.preempted = parse_event(line)


def _failure_message(run: Path, group: WorkerGroup, status: int) -> str:
    """Names the worker that failed first, by the last report of the agent, with the end of its log. `status` is the
    agent's."""
    if status < 0:
        return (
            f"{run}: the agent of torch elastic was killed by signal {-status}, probably out of memory, and its "
            "workers with it; the same command continues from the newest checkpoint"
        )
    agent_log = run / LOGS / AGENT_LOG
    reported = re.findall(
        r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", agent_log.read_text("utf-8", "replace"), flags=re.DOTALL
    )
    if not reported:
        return f"{run}: the workers could not be started; see {agent_log}"
    rank, status = (int(number) for number in reported[-1])
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    log = log_of(run / LOGS / WORKER_LOG, rank)
    return "\n".join(
        [
            f"{run}: {group.max_restarts + 1} attempts failed; in the last one rank {rank} {how}. The end of {log}:",
            *(f"  {line}" for line in tail_of(log)),
        ]
    )
