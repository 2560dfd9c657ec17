"""Kills prepare at random moments, with SIGKILL, and continues it; the folder must end with the same bytes.

Run as `python random_kills.py CORPUS KILLS WORKERS` in a corpus of `every_stage`. Every stage is switched on. With one
worker an attempt is a fork of this process, which is much faster than a new interpreter; with more it is a new process,
and now and then one of its workers is the one that dies.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ropewalk.base.errors import UserError
from ropewalk.prepare import build, chunks
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.warm import groups, warm
from tests.prepare.every_stage import every_stage
from tests.prepare.kill_everywhere import contents

FOLDER = Path("killed")


def work(workers: int) -> int:
    """One attempt, to its end; 3 when a worker of it was killed."""
    os.fsync = lambda _: None  # a kill, unlike a power cut, leaves the page cache alone
    chunks.CHUNK_BYTES, build.SPAWN_BYTES = 8000, 0
    try:
        prepare(every_stage(folder=str(FOLDER), workers=workers), seed=1)
    except UserError as error:
        if "a worker process of prepare ended" not in str(error):
            raise
        return 3
    return 0


def forked() -> int:
    """Starts an attempt in a fork; its process id."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work(1))
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    return child


def spawned(workers: int) -> int:
    """Starts an attempt in a new process; its process id."""
    command = [sys.executable, __file__, "--attempt", str(workers)]
    return subprocess.Popen(command, start_new_session=True).pid


def attempt(start: Callable[[], int], *, kill_after: float | None, worker: bool = False) -> bool:
    """Whether an attempt that is killed after so many seconds (None: never) was done before."""
    process = start()
    if kill_after is not None:
        deadline = time.monotonic() + kill_after
        while time.monotonic() < deadline:
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0, status
                return True
            time.sleep(0.002)
        os.kill(_child_of(process) if worker else process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, 3, -signal.SIGKILL), code
    return code == 0


def _child_of(process: int) -> int:
    """A worker of `process`, or itself when there is none yet."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return int(found[-1]) if found else process


def main(corpus: str, kills: int, workers: int) -> None:
    os.chdir(corpus)
    start = forked if workers == 1 else lambda: spawned(workers)
    settings = every_stage(folder=str(FOLDER))
    for group in groups(settings):  # once here, not in every child
        warm((settings, group))
    assert attempt(start, kill_after=None)  # compiles what is left
    expected = contents(FOLDER)
    shutil.rmtree(FOLDER)
    began = time.monotonic()
    assert attempt(start, kill_after=None)
    whole = time.monotonic() - began
    assert contents(FOLDER) == expected
    draw = random.Random(0)
    done = 0
    while done < kills:
        shutil.rmtree(FOLDER)
        while not attempt(start, kill_after=draw.uniform(0, whole), worker=workers > 1 and draw.random() < 0.3):
            done += 1
            if done >= kills:
                assert attempt(start, kill_after=None)
                break
        found = contents(FOLDER)
        other = [name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)]
        assert not other, f"other bytes after {done} kills: {other}"
    print(done, "kills")


if __name__ == "__main__":
    if sys.argv[1] == "--attempt":
        sys.exit(work(int(sys.argv[2])))
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
