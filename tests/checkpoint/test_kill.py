"""A kill at any labelled point or random moment of saving leaves only whole checkpoints, and all acknowledged ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_kill_at_any_point_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("kill_everywhere.py")), str(tmp_path / "checkpoints")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    # Three saves of ten points each or more, and three retirements.
    assert int(done.stdout.split()[0]) >= 25


@pytest.mark.parametrize(
    ("kills", "timeout_s"), [(60, 600), pytest.param(1000, 1800, marks=pytest.mark.slow)], ids=["60", "1000"]
)
def test_no_kill_at_a_random_moment_costs_an_acknowledged_save_or_a_bit(
    tmp_path: Path, kills: int, timeout_s: float
) -> None:
    command = [sys.executable, str(Path(__file__).with_name("kill_random.py")), str(tmp_path), str(kills), "11"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
    assert done.returncode == 0, done.stderr
    told = done.stdout.split()
    assert int(told[0]) == kills
    # Few strikes must fall between saves, or nothing was tried; and the run must get on in spite of them.
    assert int(told[2]) > kills / 10
    assert int(told[-1]) > 10
