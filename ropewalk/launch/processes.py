"""Ranks on this machine that nobody restarts: a check wants to tell which of them failed, not to hide it."""

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

from .team import TAIL_LINES, WORKER_LOG, Team, agent_environment
from .worker import guarded, log_of

LOOK_EVERY_S = 0.05
SETTLE_S = 3.0
"""Between the end of a rank that failed and the signal that makes rank 0 tell what it knows, as launchers send it."""
END_S = 10.0
"""How long the others may take to end after rank 0."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """A rank that ended by itself while rank 0 was at work."""

    status: int
    """Exit status; negative: the signal that killed it."""
    words: str
    """The end of its output."""

    def __str__(self) -> str:
        how = f"was killed by signal {-self.status}" if self.status < 0 else f"ended with status {self.status}"
        return f"{how}: {self.words}" if self.words else how


def run_ranks(command: Sequence[str], *, processes: int, folder: Path, progress: Progress) -> dict[int, RankFailure]:
    """Runs `command` as so many ranks until the first one ends; the ranks that failed before it, and the first one if
    it did. Their output goes to `folder/logs`."""
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    told = Tail(folder / LOGS / PROGRESS)
    common = agent_environment(Team(processes=processes)) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    common.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    words = guarded(folder / LOGS / WORKER_LOG, command)
    ranks = [_start(words, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(processes)]
    try:
        ended = _follow(ranks, told, progress)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and any(rank.poll() is None for rank in ranks):
            time.sleep(LOOK_EVERY_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return {rank: RankFailure(status, _last_words(folder, rank)) for rank, status in ended.items()}


def _start(words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)


def _follow(ranks: list[subprocess.Popen[bytes]], told: Tail, progress: Progress) -> dict[int, int]:
    """Shows rank 0's progress until it ends; the ranks that failed until then, with their status."""
    failed: dict[int, int] = {}
    since: float | None = None
    while ranks[0].poll() is None:
        time.sleep(LOOK_EVERY_S)
        replay(told.lines(), progress)
        for number, rank in enumerate(ranks[1:], 1):
            if rank.poll():
                failed.setdefault(number, rank.returncode)
        if failed and since is None:
            since = time.monotonic()
        if since is not None and time.monotonic() - since > SETTLE_S:
            since = float("inf")
            ranks[0].send_signal(signal.SIGTERM)
    replay(told.lines(), progress)
    return failed | ({0: ranks[0].returncode} if ranks[0].returncode else {})


def _last_words(folder: Path, rank: int) -> str:
    log = log_of(folder / LOGS / WORKER_LOG, rank)
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    return "\n".join(lines[-TAIL_LINES:])


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return str(listening.getsockname()[1])
