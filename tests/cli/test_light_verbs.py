"""Verbs that look at something answer at once: what takes long to import stays out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("numba", "pyarrow", "torch", "tokenizers", "numpy")
"""numpy alone takes a quarter of the 0.4 s of processor time that these verbs may take."""
LOOKING = """
import json, sys
from ropewalk.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["monitor"],
        ["monitor", "runs/tiny"],
        ["compare", "runs/tiny", "runs/tiny"],
        ["report", "runs/tiny"],
        ["checkpoint", "list", "runs/tiny"],
        ["recipe", "check", "tiny.toml"],
    ],
    ids=" ".join,
)
def test_a_verb_that_looks_imports_little(words: list[str], trained: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOOKING, *words]
    done = subprocess.run(command, cwd=trained, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stderr.splitlines()[-1])
    # Documents that both runs have scored are compared by resampling.
    needed = {"numpy"} if words[0] == "compare" else set()
    assert [name for name in HEAVY if name in loaded and name not in needed] == []
