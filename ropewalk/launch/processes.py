"""Ranks on this machine without restarts, for checks that report which ranks failed."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.progress import Progress
from ropewalk.base.relay import LOGS, PROGRESS, Tail, replay

from .worker import guarded, log_of, tail_of
from .worker_group import WORKER_LOG, WorkerGroup, worker_environment

LOOK_EVERY_S = 0.05
SETTLE_S = 3.0
"""From the failure of a rank to the SIGTERM that lets rank 0 report, as launchers send it."""
END_S = 10.0
"""Timeout for the other ranks after rank 0 has ended."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank that failed while rank 0 was running."""

    status: int
    """Exit status; negative: the signal that killed it."""
    output: str
    """The last lines of its output."""

    def __str__(self) -> str:
        how = f"was killed by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
        return f"{how}: {self.output}" if self.output else how


def run_ranks(command: Sequence[str], *, processes: int, folder: Path, progress: Progress) -> dict[int, RankFailure]:
    """Runs `command` on `processes` ranks until rank 0 ends; returns the ranks that failed by then. Their output goes
    to
    `folder/logs`."""
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    progress_log = Tail(folder / LOGS / PROGRESS)
    common = worker_environment(WorkerGroup(processes=processes)) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
    }
    common.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    words = guarded(folder / LOGS / WORKER_LOG, command)
    ranks = [_start(words, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(processes)]
    try:
        ended = _follow(ranks, progress_log, progress)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(LOOK_EVERY_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {
        rank: RankFailure(status, "\n".join(tail_of(log_of(folder / LOGS / WORKER_LOG, rank))))
        for rank, status in ended.items()
    }


def _start(words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _follow(ranks: list[subprocess.Popen[bytes]], progress_log: Tail, progress: Progress) -> dict[int, int]:
    """Shows the progress of rank 0 until it ends; the ranks that failed by then, with their status."""
    failed: dict[int, int] = {}
    since: float | None = None
    while ranks[0].poll() is None:
        time.sleep(LOOK_EVERY_S)
        replay(progress_log.lines(), progress)
        for number, rank in enumerate(ranks[1:], 1):
            if rank.poll():
                failed.setdefault(number, rank.returncode)
        if failed and since is None:
            since = time.monotonic()
        if since is not None and time.monotonic() - since > SETTLE_S:
            since = float("inf")
            ranks[0].send_signal(signal.SIGTERM)
    replay(progress_log.lines(), progress)
    return failed | ({0: ranks[0].returncode} if ranks[0].returncode else {})


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])
