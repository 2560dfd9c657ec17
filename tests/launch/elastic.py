"""Trainings by several processes through the command line, some of which are killed at given steps."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.checkpoint.format import identity, list_checkpoints, read_checkpoint_manifest
from tests.flow.tiny import write_tiny

ROOT = Path(__file__).parents[2]
ACCIDENTS = Path(__file__).parent / "accidents"
# bf16, which a CPU may choose by itself, rounds at 4e-3: too coarse to compare losses.
SETTINGS = ("plan.microbatch_size=1", "train.precision=fp32")


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str


def train(
    folder: Path, *words: str, kills: Iterable[tuple[int, int]] = (), before: Sequence[str] = (), timeout_s: float = 300
) -> Ended:
    """`ropewalk train tiny.toml WORDS` in `folder`, whose recipe is made when it is not there, started by the command
    `before` where there is one. Each (rank, step) of `kills` kills that rank after that step, once."""
    if not (folder / "tiny.toml").exists():
        write_tiny(folder)
    wishes = folder / "kills"
    wishes.mkdir(exist_ok=True)
    for rank, step in kills:
        (wishes / f"{rank}-{step}").touch()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ACCIDENTS}{os.pathsep}{ROOT}",
        "KILLS": str(wishes),
        "OMP_NUM_THREADS": "1",
        # A container's only user is often root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    command = [*before, sys.executable, "-m", "ropewalk", "train", "tiny.toml", *SETTINGS, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def trained_identity(folder: Path) -> str:
    """Hash of the last checkpoint in `folder`."""
    return identity(read_checkpoint_manifest(list_checkpoints(folder / "runs" / "tiny" / "checkpoints")[-1]))
