"""Runs a detached worker group: `python -m ropewalk.launch RUN PROCESSES MAX_RESTARTS GRACE_S`."""

from __future__ import annotations

import sys
from pathlib import Path

from ropewalk.base.errors import RopewalkError
from ropewalk.base.files import locked
from ropewalk.base.progress import Lines

from .worker_group import WorkerGroup, run_workers


def main(arguments: list[str]) -> int:
    """Trains the run; returns the exit status."""
    run, processes, max_restarts, grace_s = arguments
    group = WorkerGroup(processes=int(processes), max_restarts=int(max_restarts), grace_s=float(grace_s))
    try:
        with locked(Path(run)):
            run_workers(Path(run), group, progress=Lines())
    except RopewalkError as error:
        Lines().say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
