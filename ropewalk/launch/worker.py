"""Worker processes: their commands, logs and lifetime.

`python -m ropewalk.launch.worker LOG COMMAND ...` redirects the output to a log, ties the lifetime to the launcher, and
replaces itself by the command (exec), so that no process in between has to forward signals.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.base.parent import die_with_parent
from ropewalk.config.ranks import ranks

LOG = "worker.log"
TAIL_LINES = 20
"""Lines of a failed worker's log that are shown to the user."""


@dataclass(frozen=True, slots=True)
class DetachedProcess:
    """A process that outlives this one."""

    pid: int
    log: Path


def command(run: Path) -> list[str]:
    """The command of the training worker of `run`."""
    return [sys.executable, "-m", "ropewalk.train", str(run)]


def start_detached(run: Path, words: Sequence[str] | None = None) -> DetachedProcess:
    """Starts the worker, or another command, in a new session, so that it outlives this process and its terminal. Its
    output goes to a log."""
    with open(run / LOG, "ab") as log:
        process = subprocess.Popen(
            words or command(run), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return DetachedProcess(process.pid, run / LOG)


def guarded(log: Path, command: Sequence[str]) -> list[str]:
    """Wraps `command` as above; "RANK" in the name of the log is replaced by its rank."""
    return [sys.executable, "-m", __spec__.name, str(log), *command]


def main(arguments: list[str]) -> None:
    """Redirects the output and executes the command."""
    log, *command = arguments
    with open(log_of(Path(log), ranks().rank), "ab", buffering=0) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    # An orphan would write to a run that the next command considers free.
    die_with_parent()
    os.execvp(command[0], command)


def log_of(log: Path, rank: int) -> Path:
    """The log of a rank."""
    return log.with_name(log.name.replace("RANK", str(rank)))


def tail_of(log: Path) -> list[str]:
    """The last lines of a log; empty without a log."""
    return log.read_text("utf-8", "replace").splitlines()[-TAIL_LINES:] if log.exists() else []


def elastic_environment(grace_s: float) -> dict[str, str]:
    """Environment of torch elastic's agents, whose workers get `grace_s` to save when they are terminated."""
    return {
        # Otherwise torch 2.13 shares one store between attempts, in which gloo finds addresses of dead processes.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # From SIGTERM to SIGKILL; later than the limit of the workers themselves.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(grace_s) + 10),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
