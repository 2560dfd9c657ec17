"""What a launcher starts in place of a command: `python -m ropewalk.launch.worker LOG COMMAND ...`.

It sends the output to the log, makes sure that the command does not outlive its launcher, and becomes the command: same
process, no process between that would have to pass signals on.
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


@dataclass(frozen=True, slots=True)
class DetachedProcess:
    """A worker that runs by itself."""

    pid: int
    log: Path


def command(run: Path) -> list[str]:
    """What starts the worker of `run`."""
    return [sys.executable, "-m", "ropewalk.train", str(run)]


def start_detached(run: Path, words: Sequence[str] | None = None) -> DetachedProcess:
    """Starts the worker, or another command, in a session of its own, so that it outlives this process and its
    terminal; output goes to a log.
    """
    with open(run / LOG, "ab") as log:
        process = subprocess.Popen(
            words or command(run), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return DetachedProcess(process.pid, run / LOG)


def guarded(log: Path, command: Sequence[str]) -> list[str]:
    """What starts `command` so; "RANK" in the name of the log stands for the rank that it will have."""
    return [sys.executable, "-m", __spec__.name, str(log), *command]


def main(arguments: list[str]) -> None:
    """Becomes the command."""
    log, *command = arguments
    with open(log_of(Path(log), ranks().rank), "ab", buffering=0) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    # One that lives on would write a run that the next command believes to be free.
    die_with_parent()
    os.execvp(command[0], command)


def log_of(log: Path, rank: int) -> Path:
    """Where the output of a rank goes."""
    return log.with_name(log.name.replace("RANK", str(rank)))


if __name__ == "__main__":
    main(sys.argv[1:])
