"""The worker: `python -m ropewalk.train RUN`. Takes one argument, the run directory."""

from __future__ import annotations

import sys
from pathlib import Path

from ropewalk.base.errors import RopewalkError
from ropewalk.base.files import locked
from ropewalk.config.threads import share_cores

from .settings import read_settings


class _Lines:
    """A `Progress` of plain lines, for a log file."""

    def begin(self, task: str, total: float | None, unit: str) -> None:
        self.say(f"{task}: {total:.0f} {unit}" if total else task)

    def advance(self, done: float, note: str = "") -> None:
        if note:
            self.say(note)

    def end(self, note: str = "") -> None:
        self.say(note)

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Trains the run named by the only argument; the exit status."""
    if len(arguments) != 1:
        print("usage: python -m ropewalk.train RUN_DIRECTORY", file=sys.stderr)
        return 2
    run = Path(arguments[0])
    try:
        share_cores()
        from .loop import train  # after the line above: torch reads the environment when it is imported

        read_settings(run)  # before the lock, which would make a folder of any name
        with locked(run):
            train(run, progress=_Lines())
    except RopewalkError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
