"""The quickstart itself: the whole corpus, real processes, real kills."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "ropewalk", "quickstart", "train.steps=60", "checkpoint.save_every_steps=10"]
SMALL = [
    "train.schedule.warmup_steps=5",
    "train.validate_every_steps=20",
    "evaluate.samples=4",
    "evaluate.max_bytes=50000",
]


def quickstart(folder: Path, *, kill_after_s: float | None = None) -> None:
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen([*COMMAND, *SMALL], cwd=folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if kill_after_s is None:
        assert process.wait() == 0
    else:
        time.sleep(kill_after_s)
        process.kill()
        process.wait()


def outcome(folder: Path) -> dict[str, bytes]:
    files = [*(folder / "runs").rglob("*.safetensors"), *folder.rglob("*.tokens"), *folder.rglob("ledger.parquet")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.slow
def test_the_quickstart_killed_three_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    quickstart(tmp_path / "whole")
    draw = random.Random(3)
    for latest_s in (8.0, 20.0, 30.0):
        quickstart(tmp_path / "killed", kill_after_s=draw.uniform(1.0, latest_s))
    quickstart(tmp_path / "killed")
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    summary = json.loads((tmp_path / "whole/runs/quickstart/summary.json").read_text())
    assert summary["bits_per_byte"] < 3.5
    assert 1.5 < summary["xz_bits_per_byte"] < summary["zlib_bits_per_byte"] < 3
