"""The benchmarks of several ranks: the same path as on GPUs, with gloo and small models, and what they conclude."""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
FOUND: dict[str, Any] = {
    "peer": "other",
    "ratio": [0.98, 1.0, 1.1],
    "memory_gb": {"ropewalk": {"peak": 2.0}, "other": {"peak": 2.0}},
    "sent_gb": {"ropewalk": 3.0, "other": 3.0},
    "loss": {"ropewalk": [6.0, 5.0], "other": [6.0, 5.0]},
}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("nccl")


def run(script: str, *flags: str, timeout_s: float = 600) -> dict[str, Any]:
    """The JSON object of the last line."""
    command = [sys.executable, str(FOLDER / script), "--device", "cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], cases: list[str]) -> None:
    """Both did the same work and sent something. How fast they were, and how much else went over the interface
    meanwhile, is not for a test."""
    for case in cases:
        quality = found["quality"][case]
        ours, theirs = quality["loss"].values()
        assert ours == pytest.approx(theirs, rel=2e-3)
        assert ours[-1] < ours[0]
        assert min(quality["sent_gb"].values()) > 0


def test_ours_and_the_peer_do_the_same_work() -> None:
    check(run("nccl.py", "--quick", "--cases", "ddp"), ["ddp"])


@pytest.mark.slow
def test_every_case_does_the_same_work_and_is_profiled() -> None:
    check(run("nccl.py", "--quick", "--profile"), ["ddp", "zero3", "1f1b"])


@pytest.mark.slow
def test_a_sharded_run_is_killed_restored_continued_and_evaluated(tmp_path: Path) -> None:
    found = run("larger.py", "--size", "tiny", "--ranks", "2", "--folder", str(tmp_path))["quality"]
    assert found["continue"]["restored_step"] == 5
    assert len(found["train"]["losses"]) == 5
    assert found["evaluate"]["step"] == 6


def test_an_aim_that_is_missed_is_named(nccl: Any) -> None:
    assert nccl.verdict(FOUND) == "met (speed, memory, bytes)"
    for key, value, named in [
        ("ratio", [0.9, 0.96, 1.2], "speed"),
        ("memory_gb", {"ropewalk": {"peak": 2.1}, "other": {"peak": 2.0}}, "memory"),
        ("sent_gb", {"ropewalk": 3.1, "other": 3.0}, "bytes"),
        ("loss", {"ropewalk": [6.0, 5.1], "other": [6.0, 5.0]}, "the same losses"),
    ]:
        assert nccl.verdict(copy.deepcopy(FOUND) | {key: value}) == f"not met: {named}"


MPS = """\
#!/bin/sh
if [ "$1" = -d ]; then mkdir "$DAEMON"; exit; fi
read -r command
echo "$command" >> "$DAEMON/../commands"
case "$command" in quit*) (sleep 0.5; rmdir "$DAEMON") & exit;; esac
test -d "$DAEMON"
"""
"""A daemon that starts only where none runs, and takes a while to end."""


def test_every_launch_of_ranks_that_share_a_gpu_has_an_mps_daemon_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {"nvidia-smi": "#!/bin/sh\necho 'GPU 0: one'\n", "nvidia-cuda-mps-control": MPS}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    daemon = tmp_path / "daemon"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DAEMON", str(daemon))
    monkeypatch.syspath_prepend(FOLDER)
    ranks = importlib.import_module("ranks")
    for _ in range(2):
        with ranks.sharing(8, "cuda") as shares:
            assert shares
            assert daemon.exists()
        assert not daemon.exists()
    assert (tmp_path / "commands").read_text().count("quit -t") == 2
    with ranks.sharing(1, "cuda") as shares:
        assert not shares
        assert not daemon.exists()
