"""A team that runs by itself: `python -m ropewalk.launch RUN PROCESSES MAX_RESTARTS GRACE_S`."""

from __future__ import annotations

import sys
from pathlib import Path

from ropewalk.base.errors import RopewalkError
from ropewalk.base.files import locked
from ropewalk.base.progress import Lines

from .team import Team, train_together


def main(arguments: list[str]) -> int:
    """Trains the run together; the exit status."""
    run, processes, max_restarts, grace_s = arguments
    team = Team(processes=int(processes), max_restarts=int(max_restarts), grace_s=float(grace_s))
    try:
        with locked(Path(run)):
            train_together(Path(run), team, progress=Lines())
    except RopewalkError as error:
        Lines().say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
