"""The worker: `python -m ropewalk.train RUN`. Takes one argument, the run directory; with `--verify` after it, compares
the plan with one device instead of training.

One process alone holds the lock of the run; of several it is their launcher that does.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ropewalk.base.errors import RopewalkError
from ropewalk.base.events import EventLog
from ropewalk.base.files import locked
from ropewalk.base.progress import Lines, Progress
from ropewalk.base.relay import LOGS, PROGRESS, Relay
from ropewalk.base.rendezvous import Rendezvous
from ropewalk.config.ranks import Ranks, ranks
from ropewalk.config.threads import share_cores

from .failures import meet
from .settings import read_settings

VERIFY = "--verify"


def main(arguments: list[str]) -> int:
    """Trains, or verifies, the run named by the first argument; the exit status."""
    if len(arguments) not in (1, 2) or arguments[1:] not in ([], [VERIFY]):
        print(f"usage: python -m ropewalk.train RUN_DIRECTORY [{VERIFY}]", file=sys.stderr)
        return 2
    run, place = Path(arguments[0]), ranks()
    try:
        read_settings(run)  # before the lock, which would make a folder of any name
        with locked(run) if place.world == 1 else contextlib.nullcontext(), meet(run, place) as rendezvous:
            _work(run, place, rendezvous, verifies=VERIFY in arguments)
    except RopewalkError as error:
        print(error, file=sys.stderr)
        if error.exit_code and run.is_dir():
            with EventLog(run, rank=place.rank) as events:
                events.write("failed", error=type(error).__name__, message=str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


def _work(run: Path, place: Ranks, rendezvous: Rendezvous, *, verifies: bool) -> None:
    share_cores()
    # After the line above: torch reads the environment when it is imported.
    from .loop import train
    from .verify import verify

    progress = _progress(run, place)
    if verifies:
        verify(run, progress=progress)
    else:
        train(run, progress=progress, rendezvous=rendezvous)


def _progress(run: Path, place: Ranks) -> Progress:
    """Lines for the log; of several processes the first one also tells whoever launched them."""
    if place.world == 1 or place.rank > 0:
        return Lines()
    progress = Relay(run / LOGS / PROGRESS, Lines())
    if place.restart:
        progress.say(f"a worker ended; all of them start again ({place.restart})")
    return progress


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if ranks().world > 1:
        # Threads of torch's collectives now and then abort a process that ends in the ordinary way, after all is done
        # (torch 2.13: 5 of 60 runs of four processes).
        os._exit(status)
    sys.exit(status)
