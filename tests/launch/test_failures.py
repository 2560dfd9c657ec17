"""Processes that no agent watches, started as torchrun, srun and mpirun start them: when one fails, all end.

The time from the end of the first process to the end of the last is printed, not asserted: a second or two here, where
most of it is the moment that a process lingers for its launcher; ten are promised.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ropewalk.base.errors import PeerFailed
from tests.flow.tiny import write_tiny

from .elastic import ACCIDENTS, ROOT, SETTINGS

WORLD = 3
PATIENCE_S = 120.0

Environment = Callable[[int, int], dict[str, str]]


def torchrun(rank: int, port: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), **where}


def srun(rank: int, port: int) -> dict[str, str]:
    step = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": str(WORLD)}
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(WORLD), "SLURM_LOCALID": str(rank), **step}


def mpirun(rank: int, port: int) -> dict[str, str]:
    name = "OMPI_COMM_WORLD"
    return {f"{name}_RANK": str(rank), f"{name}_SIZE": str(WORLD), f"{name}_LOCAL_RANK": str(rank)}


@dataclass(frozen=True)
class Ended:
    status: int
    err: str


def launch(folder: Path, environment: Environment, *words: str, wishes: dict[str, str] | None = None) -> list[Ended]:
    """`ropewalk train tiny.toml WORDS` on every rank; how each ended. `wishes` are accidents: RANK-STEP to the words of
    an exception, "" for SIGKILL."""
    write_tiny(folder)
    (folder / "kills").mkdir()
    for name, text in (wishes or {}).items():
        (folder / "kills" / name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": f"{ACCIDENTS}{os.pathsep}{ROOT}", "KILLS": "kills", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ropewalk", "train", "tiny.toml", *SETTINGS, *words]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    ranks = [
        subprocess.Popen(command, cwd=folder, env=common | environment(rank, port), text=True, **pipes)
        for rank in range(WORLD)
    ]
    try:
        return watched(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def watched(ranks: list[subprocess.Popen[str]]) -> list[Ended]:
    start = time.monotonic()
    ends: dict[int, float] = {}
    while len(ends) < len(ranks) and time.monotonic() - start < PATIENCE_S:
        ends |= {rank.pid: time.monotonic() for rank in ranks if rank.pid not in ends and rank.poll() is not None}
        time.sleep(0.02)
    assert len(ends) == len(ranks), "some ranks wait on"
    print(f"all ended {max(ends.values()) - min(ends.values()):.2f} s after the first")
    return [Ended(rank.returncode, rank.communicate()[1]) for rank in ranks]


@pytest.mark.parametrize(
    "environment", [torchrun, *(pytest.param(each, marks=pytest.mark.slow) for each in (srun, mpirun))]
)
def test_a_setting_that_rank_0_refuses_ends_all_ranks_with_its_message(
    environment: Environment, tmp_path: Path
) -> None:
    ended = launch(tmp_path, environment, "parallel.tensor=2")
    assert [rank.status for rank in ended] == [2] * WORLD
    message = ended[0].err.strip().splitlines()[-1]
    assert "3 processes" in message or "3 ranks" in message
    for rank in ended[1:]:
        assert f"rank 0 on {socket.gethostname()} failed first: " in rank.err
        assert message in rank.err
        assert "Traceback" not in rank.err


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        pytest.param("a strand broke", "failed first after step 3: ValueError: a strand broke", id="raises"),
        pytest.param("", "failed first: it ended without a word", id="killed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_in_training_ends_the_others_with_the_first_error(
    wish: str, said: str, tmp_path: Path
) -> None:
    ended = launch(tmp_path, torchrun, "train.batch_rows=3", wishes={"1-3": wish})
    assert ended[1].status == (1 if wish else -9)
    for rank in (ended[0], ended[2]):
        assert rank.status == PeerFailed.exit_code, rank.err
        assert f"rank 1 on {socket.gethostname()} {said}" in rank.err
        assert "Traceback" not in rank.err
