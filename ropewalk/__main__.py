"""`ropewalk` and `python -m ropewalk`."""

from __future__ import annotations

import signal


def start() -> None:
    """Runs the command line. Ctrl-C while it is still being imported ends the process without a word."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # a process that was started in the background ignores it, and goes on to
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ropewalk.cli.main import main

    signal.signal(signal.SIGINT, usual)
    main()


if __name__ == "__main__":
    start()
