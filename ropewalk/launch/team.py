"""Several workers on this machine, as torch elastic runs them: one that dies makes all start again.

This process follows what they write into the run directory: the progress of rank 0 is shown as if the work were done
here, and a failure that would come back on every attempt (a request that cannot be met, a full disk) ends the team
instead of starting it again.
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

from .worker import DetachedProcess, command, guarded, log_of, start_detached

AGENT_LOG, WORKER_LOG = "launcher.log", "rank-RANK.log"
LOOK_EVERY_S = 0.1
TAIL_LINES = 20
"""Of a failed worker's log, shown to the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """Who works on a run."""

    processes: int
    max_restarts: int = 3
    """How often all may start again."""
    grace_s: float = 30.0
    """How long they may save when they are asked to end."""
    worker: Sequence[str] | None = None
    """What each of them runs; None: the training of the run."""


def train_together(run: Path, team: Team, *, progress: Progress) -> None:
    """Runs `team` in the directory `run` until it is done; raises what ended it otherwise. The caller holds the lock of
    the run."""
    for _ in follow(run, team, progress=progress):
        pass


def follow(run: Path, team: Team, *, progress: Progress, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """The same, with a pause each time after `progress` was told what is new; who does not come back ends the team.
    `say` takes what this process has to say itself; without it `progress` does.

    Ctrl-C and the signals of schedulers are passed on once, so that the workers can save; after a second Ctrl-C they
    are killed.
    """
    diary = _Diary(run, team.processes)
    with _started(run, team) as agent, _passing_on(agent) as room_wanted:
        interrupted = False
        while agent.poll() is None:
            try:
                time.sleep(LOOK_EVERY_S)
                diary.read(progress)
                if diary.failed:
                    agent.send_signal(signal.SIGTERM)
                    agent.wait()
                yield
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                (say or progress.say)("interrupted: waiting for the workers to save; Ctrl-C again kills them")
                agent.send_signal(signal.SIGINT)
        diary.read(progress)
    if diary.failed:
        damaged = diary.failed["error"] == DamagedCheckpoint.__name__
        raise (DamagedCheckpoint if damaged else UserError)(diary.failed["message"])
    # The agent too tells survivors to make room, when it is about to start all of them again.
    if room_wanted.is_set() and (diary.preempted or agent.returncode):
        where = f"at step {diary.preempted['step']}" if diary.preempted else "before anything was trained"
        raise Preempted(f"preempted {where}; the same command continues")
    if interrupted:
        raise KeyboardInterrupt
    if agent.returncode:
        raise WorkersFailed(_post_mortem(run, team, agent.returncode))


def start_team_detached(run: Path, team: Team) -> DetachedProcess:
    """Starts `train_together` in a process that outlives this one; output goes to a log."""
    numbers = (str(team.processes), str(team.max_restarts), str(team.grace_s))
    return start_detached(run, [sys.executable, "-m", "ropewalk.launch", str(run), *numbers])


def agent_command(run: Path, team: Team) -> list[str]:
    """What starts torch elastic's agent, which starts the workers."""
    agent = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(team.processes), "--max-restarts", str(team.max_restarts), "--no-python"),
        *guarded(run / LOGS / WORKER_LOG, team.worker or command(run)),
    ]
    return guarded(run / LOGS / AGENT_LOG, agent)


def agent_environment(team: Team) -> dict[str, str]:
    """The environment of the workers: this one, with the cores shared out."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // team.processes)),
        **os.environ,
        # Else torch 2.13 keeps one store over all attempts, in which gloo finds the addresses of dead processes.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Between the signal to end and the one that kills; the workers' own limit is to come first.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(team.grace_s) + 10),
    }


@contextlib.contextmanager
def _started(run: Path, team: Team) -> Iterator[subprocess.Popen[bytes]]:
    """The agent, in a session of its own: Ctrl-C reaches it through us alone. Killed, with the workers, at the end."""
    (run / LOGS).mkdir(parents=True, exist_ok=True)
    agent = subprocess.Popen(
        agent_command(run, team), env=agent_environment(team), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()


@contextlib.contextmanager
def _passing_on(agent: subprocess.Popen[bytes]) -> Iterator[threading.Event]:
    """Requests to make room reach the workers, and set the event. A scheduler repeats its signal; once is enough.
    Signals come to the main thread; elsewhere nothing is passed on."""
    wanted = threading.Event()

    def pass_on(number: int, frame: Any) -> None:
        if not wanted.is_set():
            wanted.set()
            agent.send_signal(signal.SIGTERM)

    here = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGUSR1) if here else ()
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Diary:
    """What the workers write from now on."""

    def __init__(self, run: Path, processes: int) -> None:
        self._progress = Tail(run / LOGS / PROGRESS)
        self._events = [Tail(events_path(run, rank=rank)) for rank in range(processes)]
        self.failed: Event | None = None
        """The first failure that another attempt would repeat."""
        self.preempted: Event | None = None

    def read(self, progress: Progress) -> None:
        replay(self._progress.lines(), progress)
        for tail in self._events:
            for line in tail.lines():
                self._note(line)

    def _note(self, line: bytes) -> None:
        # Nearly all lines are of other kinds; only these are worth parsing.
        if b'"kind": "failed"' in line and not self.failed:
            self.failed = parse_event(line)
        elif b'"kind": "preempted"' in line:
            self.preempted = parse_event(line)


def _post_mortem(run: Path, team: Team, status: int) -> str:
    """Which worker failed first, by the agent's last report, and its last words. `status` is the agent's own."""
    if status < 0:
        return (
            f"{run}: the process that watches the workers (torch elastic's agent) was killed by signal {-status}, "
            "perhaps for want of memory, and the workers ended with it; the same command continues from the newest "
            "checkpoint"
        )
    agent_log = run / LOGS / AGENT_LOG
    reported = re.findall(
        r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", agent_log.read_text("utf-8", "replace"), flags=re.DOTALL
    )
    if not reported:
        return f"{run}: the workers could not be started; {agent_log} tells why"
    rank, status = (int(number) for number in reported[-1])
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    log = log_of(run / LOGS / WORKER_LOG, rank)
    words = log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:] if log.exists() else []
    return "\n".join(
        [
            f"{run}: {team.max_restarts + 1} attempts failed; in the last one rank {rank} {how}. The end of {log}:",
            *(f"  {word}" for word in words),
        ]
    )
