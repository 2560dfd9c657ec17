"""Ranks that no agent watches, started as torchrun, srun and mpirun start them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .elastic import ACCIDENTS, ROOT, SETTINGS

PATIENCE_S = 240.0

Environment = Callable[[int, int, int], dict[str, str]]
"""Of a rank, of so many, that meet at a port."""


def torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), **where}


def srun(rank: int, world: int, port: int) -> dict[str, str]:
    step = {"SLURM_JOB_ID": str(port), "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": str(world)}
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world), "SLURM_LOCALID": str(rank), **step}


def mpirun(rank: int, world: int, port: int) -> dict[str, str]:
    name = "OMPI_COMM_WORLD"
    return {f"{name}_RANK": str(rank), f"{name}_SIZE": str(world), f"{name}_LOCAL_RANK": str(rank)}


@dataclass(frozen=True)
class Ended:
    status: int
    err: str


def launch(
    folder: Path, environment: Environment, *words: str, world: int, accidents: Mapping[str, str] | None = None
) -> list[Ended]:
    """`ropewalk train tiny.toml WORDS` on every rank; how each ended. `accidents` maps RANK-STEP to the words of an
    exception, or to "" for SIGKILL."""
    (folder / "kills").mkdir(exist_ok=True)
    for name, text in (accidents or {}).items():
        (folder / "kills" / name).write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": f"{ACCIDENTS}{os.pathsep}{ROOT}", "KILLS": "kills", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ropewalk", "train", "tiny.toml", *SETTINGS, *words]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    ranks = [
        subprocess.Popen(command, cwd=folder, env=common | environment(rank, world, port), text=True, **pipes)
        for rank in range(world)
    ]
    try:
        return _watch(ranks)
    finally:
        for rank in ranks:
            rank.kill()


def _watch(ranks: list[subprocess.Popen[str]]) -> list[Ended]:
    start = time.monotonic()
    ends: dict[int, float] = {}
    while len(ends) < len(ranks) and time.monotonic() - start < PATIENCE_S:
        ends |= {rank.pid: time.monotonic() for rank in ranks if rank.pid not in ends and rank.poll() is not None}
        time.sleep(0.02)
    assert len(ends) == len(ranks), "some ranks wait on"
    print(f"all ended {max(ends.values()) - min(ends.values()):.2f} s after the first")
    return [Ended(rank.returncode, rank.communicate()[1]) for rank in ranks]
