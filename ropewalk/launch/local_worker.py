"""A worker on this machine: `python -m ropewalk.train RUN` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LOG = "worker.log"


@dataclass(frozen=True, slots=True)
class Started:
    """A worker that runs by itself."""

    pid: int
    log: Path


def command(run: Path) -> list[str]:
    """What starts the worker of `run`."""
    return [sys.executable, "-m", "ropewalk.train", str(run)]


def start_detached(run: Path, words: Sequence[str] | None = None) -> Started:
    """Starts the worker, or another command, in a session of its own, so that it outlives this process and its
    terminal; output goes to a log.
    """
    with open(run / LOG, "ab") as log:
        process = subprocess.Popen(
            words or command(run), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return Started(process.pid, run / LOG)
