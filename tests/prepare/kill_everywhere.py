"""Kills prepare at labelled points in turn and continues it; the folder must end with the same bytes.

Run as `python kill_everywhere.py CORPUS EVERY`: at the first point, the EVERY-th after it, and so on. Prints the number
of kills. Every attempt is a fork of this process, which itself starts no thread: that is much faster than a new
interpreter for each. Nothing is fsynced: a kill, unlike a power cut, leaves the page cache alone.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from ropewalk.prepare import chunks
from ropewalk.prepare.config import Filter, Prepare, Source, Tokenizer
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.warm import groups, warm


def attempt(settings: Prepare, *, kill_at: int) -> bool:
    """Prepares in a child process that is killed at point `kill_at` (0: never); whether it lived."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, _: tuple[object, ...]) -> None:
            nonlocal seen
            if event == "ropewalk.point":
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            prepare(settings, seed=1)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise SystemExit(f"kill at {kill_at}: exit status {status}")
    return status == 0


def contents(folder: Path) -> dict[str, bytes]:
    """All files below `folder`, by name.

    Not among them: locks, checksums that depend on when a file was last touched, and what a killed worker of a killed
    parent was writing, which the next start sweeps away.
    """
    names = {path: path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    kept = {path: name for path, name in names.items() if not re.search(r"\.lock$|checksums|\.partial\b", name)}
    return {name: path.read_bytes() for path, name in kept.items()}


def main(corpus: str, every: int) -> None:
    os.chdir(corpus)
    os.fsync = lambda _: None
    chunks.CHUNK_BYTES = 9000
    settings = Prepare(
        sources=(Source(name="texts", paths=("texts",)),),
        filter=Filter(min_characters=100),
        tokenizer=Tokenizer(vocab_size=280, train_bytes=2000),
        workers=1,
        folder="killed",
    )
    for group in groups(settings):  # once here, not in every child
        warm((settings, group))
    assert attempt(settings, kill_at=0)
    expected = contents(Path("killed"))
    assert any(name.endswith("manifest.json") for name in expected)
    for kills in itertools.count():
        point = 1 + kills * every
        shutil.rmtree("killed")
        if attempt(settings, kill_at=point):
            break
        assert attempt(settings, kill_at=0)
        assert contents(Path("killed")) == expected, f"other bytes after a kill at point {point}"
    print(kills, "kills")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
