"""Who waits for a process may be killed at any moment: the process ends too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")

SLEEPER = """
import os, sys, time
from ropewalk.base.parent import die_with_parent
die_with_parent()
print(os.getpid(), flush=True)
time.sleep(1000)
"""
STARTER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"
BENCH = "from ropewalk.flow.training_bench import bench_train; bench_train(['tiny'], device='cpu', steps=10**6)"


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(true: Callable[[], bool], *, timeout_s: float = 100) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_its_parent(by: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        parent.send_signal(by)
    wait_until(lambda: not alive(child))


@pytest.mark.parametrize("when", ["at once", "later"])
def test_the_worker_of_a_bench_ends_with_it(when: str) -> None:
    """Also when the bench is gone before its worker has imported torch."""
    with subprocess.Popen([sys.executable, "-c", BENCH]) as parent:
        wait_until(lambda: bool(children(parent.pid)))
        (worker,) = children(parent.pid)
        if when == "later":
            wait_until(lambda: "libtorch" in Path(f"/proc/{worker}/maps").read_text())
            imported = processor_seconds(worker)
            wait_until(lambda: processor_seconds(worker) > imported + 2)
        parent.kill()
    try:
        wait_until(lambda: not alive(worker), timeout_s=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def processor_seconds(pid: int) -> float:
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
