"""Killed at any moment, the same command continues; the result is bit for bit that of a run never killed."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .tiny import write_tiny

RUN = ["run", "tiny.toml"]
PARTS = 4


class Server:
    """A process that runs the command line in children and reports how they ended."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("fork_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
        )

    def run(self, folder: Path, *, label: str | None = None, after_s: float | None = None) -> dict:
        job = {"folder": str(folder), "arguments": RUN, "kill_label": label, "kill_after_s": after_s}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=200)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: a SIGKILL loses no page of it, and fsync costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def whole(server: Server, memory: Path) -> tuple[Path, list[str]]:
    """A run that was never killed, and the points it passed in order."""
    folder = memory / "whole"
    write_tiny(folder)
    ended = server.run(folder)
    assert ended["status"] == 0, (folder / "output.txt").read_text()
    return folder, ended["labels"]


def outcome(folder: Path) -> dict[str, bytes]:
    """Every byte that a killed run must share with one that was not; `prepared/stages` only saves time."""
    run = folder / "runs" / "tiny"
    files = [*sorted((run / "checkpoints").rglob("*")), run / "samples.jsonl", run / "evaluation" / "results.json"]
    stages = folder / "prepared" / "stages"
    prepared = sorted((folder / "prepared").rglob("*"))
    files += [path for path in prepared if path.name != ".lock" and stages not in path.parents]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def finish(server: Server, folder: Path) -> None:
    ended = server.run(folder)
    assert ended["status"] == 0, (folder / "output.txt").read_text()


def points(labels: list[str]) -> list[str]:
    """Every labelled point once, in the order in which a run passes them."""
    # Checksums are remembered only of files that were written some seconds ago, which a loaded machine may make these.
    return [label for label in dict.fromkeys(labels) if not label.endswith(":checksums")]


def one_of_each_kind(labels: list[str]) -> list[str]:
    """A point of each kind (`file.begin`, `train.step`, ...), the first of one, a later one of the next, and so on."""
    kinds: dict[str, list[str]] = {}
    for label in labels:
        kinds.setdefault(label.partition(":")[0], []).append(label)
    return [found[number * len(found) // len(kinds)] for number, found in enumerate(kinds.values())]


def assert_kills_are_harmless(server: Server, reference: Path, folder: Path, labels: list[str]) -> None:
    """Kills a run in `folder` at each of these points, one run a point, and continues it."""
    expected = outcome(reference)
    for label in labels:
        write_tiny(folder)
        assert server.run(folder, label=label)["status"] == -9, label
        finish(server, folder)
        assert outcome(folder) == expected, label
        shutil.rmtree(folder)


def test_a_run_killed_at_a_point_of_each_kind_ends_with_the_same_bits(
    server: Server, whole: tuple[Path, list[str]], memory: Path
) -> None:
    reference, labels = whole
    some = one_of_each_kind(points(labels))
    assert {label.partition(".")[0] for label in some} == {"file", "stage", "train", "checkpoint"}
    assert_kills_are_harmless(server, reference, memory / "killed", some)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_run_killed_at_any_labelled_point_ends_with_the_same_bits(
    part: int, server: Server, whole: tuple[Path, list[str]], memory: Path
) -> None:
    reference, labels = whole
    assert len(points(labels)) > 50
    assert_kills_are_harmless(server, reference, memory / f"killed-{part}", points(labels)[part::PARTS])


def test_a_run_killed_three_times_at_random_moments_ends_with_the_same_bits(
    server: Server, whole: tuple[Path, list[str]], memory: Path
) -> None:
    expected = outcome(whole[0])
    draw = random.Random(5)
    for attempt in range(4):
        folder = memory / f"random-{attempt}"
        write_tiny(folder)
        for _ in range(3):
            server.run(folder, after_s=draw.uniform(0.01, 0.4))
        finish(server, folder)
        assert outcome(folder) == expected


def test_a_finished_run_does_nothing_again(server: Server, whole: tuple[Path, list[str]]) -> None:
    before = outcome(whole[0])
    again = server.run(whole[0])
    assert again["status"] == 0
    assert not [label for label in again["labels"] if label.startswith(("train.", "folder.", "checkpoint."))]
    assert outcome(whole[0]) == before
