"""Bytes on the network in one step, as the system counts them, against those that the events of a run tell."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OVERHEAD = 1.03
"""Headers, acknowledgements and messages that are not counted: 0.5 % were seen."""


@functools.cache
def can_unshare() -> bool:
    """Whether this user may make a network namespace."""
    return bool(shutil.which("unshare")) and subprocess.run(["unshare", "-rn", "true"], check=False).returncode == 0


@functools.cache
def found() -> dict[str, dict[str, float]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = ["unshare", "-rn", sys.executable, "-m", "tests.parallel.wire_worker"]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


pytestmark = [
    pytest.mark.skipif(not can_unshare(), reason="may not make a network namespace"),
    pytest.mark.xdist_group("wire"),
]


@pytest.mark.parametrize("plan", ["replicas", "zero 1", "zero 2", "zero 3"])
def test_as_many_bytes_are_on_the_wire_as_are_counted(plan: str) -> None:
    assert found()[plan]["counted"] <= found()[plan]["wire"] <= OVERHEAD * found()[plan]["counted"]


def test_zero_1_and_2_send_what_replicas_send_and_zero_3_half_as_much_again() -> None:
    replicas = found()["replicas"]["wire"]
    # Padded to the same number of rows a rank; of stage 3 what lies outside of blocks is gathered once only.
    assert found()["zero 1"]["wire"] <= OVERHEAD * replicas
    assert found()["zero 2"]["wire"] <= OVERHEAD * replicas
    assert 1.4 * replicas <= found()["zero 3"]["wire"] <= 1.5 * OVERHEAD * replicas
