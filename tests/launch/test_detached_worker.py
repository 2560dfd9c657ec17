"""A worker of its own process really trains, and outlives whoever started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.launch.worker import command, start_detached
from tests.tiny import make_run

ROOT = Path(__file__).parents[2]
START = "import sys; from pathlib import Path; from ropewalk.launch.worker import start_detached; "
START += "print(start_detached(Path(sys.argv[1])).pid)"


def wait_for(path: Path, *, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear in {timeout_s} s"
        time.sleep(0.05)


def test_the_command_names_the_run_and_nothing_else(tmp_path: Path) -> None:
    assert command(tmp_path) == [sys.executable, "-m", "ropewalk.train", str(tmp_path)]


def test_a_detached_worker_outlives_its_starter_and_trains_to_the_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    starter = subprocess.run(
        [sys.executable, "-c", START, str(run)], cwd=ROOT, capture_output=True, text=True, check=True, timeout=200
    )
    wait_for(run / "checkpoints" / "step-00000008")
    assert verify_checkpoint(list_checkpoints(run / "checkpoints")[-1]) == []
    assert int(starter.stdout) > 0
    wait_until_gone(int(starter.stdout))
    assert "train 8/8 steps" in (run / "worker.log").read_text()


def wait_until_gone(pid: int, *, timeout_s: float = 100) -> None:
    deadline = time.monotonic() + timeout_s
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.05)


def test_a_detached_worker_leads_a_session_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    started = start_detached(tmp_path / "run")
    assert os.getsid(started.pid) == started.pid != os.getsid(0)
    assert os.waitstatus_to_exitcode(os.waitpid(started.pid, 0)[1]) == 2
    assert "is not a run directory" in started.log.read_text() or "no such" in started.log.read_text()
