"""What the benchmarks share: an environment for each peer, a table, and one JSON object as the last line."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def environment(name: str, packages: Sequence[str], *, constrained: bool = True) -> Path:
    """The Python of an environment of its own with `packages` at the tested versions; made once, kept in .bench/.

    A peer that needs other versions than ours is not `constrained`. A package may stand behind options of pip:
    `--no-deps litdata`.
    """
    folder = ROOT / ".bench" / name
    stamp = folder / ".installed"
    wanted = "\n".join(packages)
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        for package in packages:
            install = [folder / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            versions = ["-c", ROOT / "constraints.txt"] if constrained else []
            subprocess.run([*install, *versions, *package.split()], check=True, stderr=sys.stderr)
        stamp.write_text(wanted)
    return folder / "bin/python"


def call(python: Path | str, script: str, *arguments: str) -> Any:
    """The JSON object that `script` prints last, run by `python`."""
    done = subprocess.run(
        [str(python), script, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def finish(
    name: str, *, ours: dict[str, float], peers: dict[str, dict[str, float]], ratios: dict[str, float], quality: Any
) -> None:
    """Prints the table and the closing JSON line. A ratio above 1 means that ours is better."""
    for who, figures in {"ropewalk": ours, **peers}.items():
        print(f"{who:<16}", "  ".join(f"{key} {value:,.4g}" for key, value in figures.items()))
    for who, ratio in ratios.items():
        print(f"ours / {who:<10} {ratio:.2f} (worst case)")
    value = {"name": name, "ours": ours, "peers": peers, "ratios": ratios, "quality": quality, "machine": machine()}
    print(json.dumps(value))


def machine() -> str:
    """Processor, cores and GPU, for the record."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"
