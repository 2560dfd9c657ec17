"""A kill at any labelled point of save and retain leaves only whole checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_kill_at_any_point_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("kill_everywhere.py")), str(tmp_path / "checkpoints")]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    # Three saves of ten points each or more, and three retirements.
    assert int(done.stdout.split()[0]) >= 25
