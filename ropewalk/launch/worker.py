"""What a launcher starts in place of a command: `python -m ropewalk.launch.worker LOG COMMAND ...`.

It sends the output to the log, makes sure that the command does not outlive its launcher, and becomes the command: same
process, no process between that would have to pass signals on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ropewalk.base.parent import die_with_parent
from ropewalk.config.ranks import ranks


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
