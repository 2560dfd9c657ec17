"""Kills a search for repeats at every labelled point in turn and continues it; the result must have the same bytes.

Run as `python kill_substring.py FOLDER`; prints the number of points for each method. Attempts are forks of this
process, as in `kill_everywhere`.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from ropewalk.prepare.config import Substring
from ropewalk.prepare.substring import match, sift
from ropewalk.prepare.substring.find import find_repeats
from ropewalk.prepare.workers import Workers


def attempt(work: Callable[[], object], *, kill_at: int) -> bool:
    """Does `work` in a child process that is killed at point `kill_at` (0: never); whether it lived."""
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
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise SystemExit(f"kill at {kill_at}: exit status {status}")
    return status == 0


def contents(folder: Path) -> dict[str, bytes]:
    """All files below `folder`, by name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def main(folder: Path) -> None:
    os.fsync = lambda _: None
    sift.REGION_BYTES, sift.PART_BYTES, match.PARTS_A_TASK = 1500, 900, 2
    dice = random.Random(1)
    pool = ["".join(dice.choices("abcdefgh 绳", k=90)) for _ in range(9)]
    texts = pa.array(["".join(dice.choices(pool, k=2)) + str(dice.random()) for _ in range(12)], pa.large_string())
    for method, memory_bytes in (("windows", 1_000_000), ("suffix-array", 50_000)):
        settings = Substring(length=40, method=method, memory_bytes=memory_bytes)
        target = folder / method

        def work(settings: Substring = settings, target: Path = target) -> None:
            with Workers(1) as workers:
                find_repeats([texts], settings=settings, folder=target, workers=workers)

        work()  # here, so that every attempt finds the kernels loaded
        expected = contents(target)
        assert set(expected) == {"documents.parquet", "spans.parquet"}
        point = 0
        while True:
            point += 1
            shutil.rmtree(target)
            if attempt(work, kill_at=point):
                break
            assert attempt(work, kill_at=0)
            assert contents(target) == expected, f"other bytes after a kill at point {point} of {method}"
        print(point - 1, method)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
