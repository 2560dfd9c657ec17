"""A worker of `doctor cluster` on this machine: `python -m ropewalk.train.cluster FOLDER RUN`.

FOLDER has the brief; rank 0 writes its table there. RUN is the run directory whose storage is checked.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ropewalk.base.errors import RopewalkError
from ropewalk.base.files import read_json, write_json
from ropewalk.base.progress import Lines, Progress
from ropewalk.base.relay import LOGS, PROGRESS, Relay
from ropewalk.config.ranks import ranks
from ropewalk.config.threads import share_cores

from .brief import FILE, TABLE, Brief


def main(arguments: list[str]) -> int:
    """Runs the checks, writes the table on rank 0, and returns the exit status."""
    folder, run = map(Path, arguments)
    brief, place = Brief(**read_json(folder / FILE, what="brief")), ranks()
    share_cores()
    from .examine import Examination  # torch reads the environment when it is imported

    progress: Progress = Relay(folder / LOGS / PROGRESS, Lines()) if place.rank == 0 else Lines()
    try:
        table = Examination(place, timeout_s=brief.timeout_s, progress=progress).run(lambda: run, lambda: brief)
    except RopewalkError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if place.rank == 0:
        write_json(folder / TABLE, table)
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A measurement may still wait in a collective, and torch's threads sometimes abort a normal exit.
    os._exit(status)
