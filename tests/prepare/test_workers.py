"""Worker processes: the same results, errors that arrive, no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.prepare.workers import Workers


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    raise DataError(f"{number} is refused")


def touch(path: Path) -> None:
    path.touch()


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def linger(number: int) -> int:
    os.write(1, f"{os.getpid()}\n".encode())  # in one piece: two workers share the pipe
    time.sleep(600)
    return number


@pytest.mark.parametrize("processes", [1, 2])
def test_every_task_has_its_result(processes: int) -> None:
    with Workers(processes) as workers:
        assert sorted(workers.map(square, range(5))) == [0, 1, 4, 9, 16]


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    with Workers(2) as workers, pytest.raises(DataError, match="is refused"):
        list(workers.map(refuse, [1, 2]))


def test_a_worker_that_is_killed_is_reported_with_a_remedy() -> None:
    with Workers(2) as workers, pytest.raises(UserError, match=r"fewer `prepare.workers`"):
        list(workers.map(die, [1, 2]))


def test_a_worker_that_died_between_tasks_is_reported_too() -> None:
    with Workers(2) as workers:
        assert sorted(workers.map(square, [1, 2])) == [1, 4]
        with pytest.raises(UserError, match=r"fewer `prepare.workers`"):
            list(workers.map(die, [1]))
        with pytest.raises(UserError, match=r"fewer `prepare.workers`"):
            list(workers.map(square, [1]))
        with pytest.raises(UserError, match=r"fewer `prepare.workers`"):
            workers.start(square, [1])


def test_what_was_started_is_waited_for(tmp_path: Path) -> None:
    with Workers(2) as workers:
        workers.start(touch, [tmp_path / "a", tmp_path / "b"])()
        assert sorted(tmp_path.iterdir()) == [tmp_path / "a", tmp_path / "b"]
    Workers(1).start(touch, [tmp_path / "c"])()
    assert not (tmp_path / "c").exists()


def test_workers_end_when_their_parent_is_killed() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_workers as t\n"
        "if __name__ == '__main__': list(t.Workers(2).map(t.linger, [1, 2]))"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            pids = [int(parent.stdout.readline()) for _ in range(2)]
        finally:
            parent.kill()
        deadline = time.monotonic() + 60
        while any(map(alive, pids)):
            assert time.monotonic() < deadline, "a worker outlived its parent"
            time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
