"""Several workers on this machine: one that is killed makes all start again, one that cannot go on ends them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ropewalk.base.errors import UserError, WorkersFailed
from ropewalk.base.files import read_json
from ropewalk.launch.worker import log_of
from ropewalk.launch.worker_group import WorkerGroup, run_workers, worker_environment
from tests.heard import Heard
from tests.launch.test_detached_worker import wait_until_gone

STEPS = 30
SUM = sum(rank + step for rank in (0, 1) for step in range(STEPS))


def team(run: Path, *, steps: int = STEPS, max_restarts: int = 1) -> WorkerGroup:
    worker = [sys.executable, "-m", "tests.launch.summing", str(run), str(steps)]
    return WorkerGroup(processes=2, max_restarts=max_restarts, worker=worker)


def state(run: Path) -> dict:
    return read_json(run / "state.json", what="state")


def test_a_killed_worker_makes_all_start_again_and_nothing_is_lost(tmp_path: Path) -> None:
    heard = Heard()
    (tmp_path / "kill-1").write_text("10")
    run_workers(tmp_path, team(tmp_path), progress=heard)
    assert (state(tmp_path)["sum"], state(tmp_path)["attempts"]) == (SUM, 2)
    assert heard.calls[0] == ("begin", "sum", STEPS, "steps")
    assert heard.calls[-1] == ("end", f"the sum is {SUM}")
    assert [call[1] for call in heard.calls if call[0] == "advance"][-3:] == [28, 29, 30]
    assert "rank 1 starts at step 10" in (tmp_path / "logs" / "rank-1.log").read_text()


@pytest.mark.slow
def test_an_agent_that_is_killed_is_named_and_the_same_call_continues(tmp_path: Path) -> None:
    (tmp_path / "kill-agent").write_text("10")
    with pytest.raises(WorkersFailed, match=r"agent\) was killed by signal 9, .* the same command continues"):
        run_workers(tmp_path, team(tmp_path), progress=Heard())
    wait_until_gone(state(tmp_path)["pid"])
    run_workers(tmp_path, team(tmp_path), progress=Heard())
    assert (state(tmp_path)["sum"], state(tmp_path)["attempts"]) == (SUM, 2)


def test_a_worker_that_cannot_go_on_ends_the_team_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "refuse").write_text("5")
    with pytest.raises(UserError, match=r"^the disk of rank 1 is full$"):
        run_workers(tmp_path, team(tmp_path, max_restarts=9), progress=Heard())
    assert state(tmp_path)["attempts"] == 1


def test_the_last_words_of_a_worker_that_fails_too_often_are_shown(tmp_path: Path) -> None:
    worker = [sys.executable, "-c", "raise SystemExit('no such thing as a free lunch')"]
    with pytest.raises(WorkersFailed, match=r"2 attempts failed; .* rank [01] ended with status 1") as told:
        run_workers(tmp_path, WorkerGroup(processes=2, max_restarts=1, worker=worker), progress=Heard())
    assert "  no such thing as a free lunch" in str(told.value)


def test_after_ctrl_c_the_workers_save_and_the_same_call_continues(tmp_path: Path) -> None:
    presser = threading.Thread(target=press_ctrl_c_at, args=(tmp_path, 3), daemon=True)
    # A shell lets what it starts in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    presser.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_workers(tmp_path, team(tmp_path, steps=100_000), progress=Heard())
    finally:
        signal.signal(signal.SIGINT, before)
    presser.join()
    reached = state(tmp_path)
    wait_until_gone(reached["pid"])
    run_workers(tmp_path, team(tmp_path, steps=reached["step"] + 1), progress=Heard())
    assert state(tmp_path)["attempts"] == 2


def press_ctrl_c_at(run: Path, step: int) -> None:
    while not (run / "state.json").exists() or state(run)["step"] < step:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def test_cores_are_shared_out_unless_the_user_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    assert worker_environment(WorkerGroup(processes=5))["OMP_NUM_THREADS"] == "2"
    assert worker_environment(WorkerGroup(processes=50))["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_environment(WorkerGroup(processes=5))["OMP_NUM_THREADS"] == "7"


def test_a_log_is_named_by_its_rank_and_not_by_its_folder() -> None:
    assert log_of(Path("RANK/logs/rank-RANK.log"), 3) == Path("RANK/logs/rank-3.log")
