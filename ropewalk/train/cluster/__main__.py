"""A worker of `doctor cluster` on this machine: `python -m ropewalk.train.cluster FOLDER RUN`.

FOLDER holds the brief and takes the table of rank 0; RUN is the run directory whose storage is checked.
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
    """Checks, and writes the table where this is rank 0; the exit status."""
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
    # A measurement may still wait in a collective; threads of torch's now and then abort an ordinary end, too.
    os._exit(status)
