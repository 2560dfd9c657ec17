"""`ropewalk doctor cluster` through the command line: processes of this machine, and of a launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.elastic import ACCIDENTS, ROOT

from .conftest import Call

SPEEDS = {"matmul", "control", "axis shard", "axis world", "links", "storage", "host"}
"""Checks that a busy machine may find slow."""


@pytest.fixture
def accidents(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files make ranks fail: RANK-STEP."""
    monkeypatch.setenv("PYTHONPATH", f"{ACCIDENTS}{os.pathsep}{ROOT}")
    monkeypatch.setenv("KILLS", str(tiny / "kills"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tiny / "kills").mkdir()
    return tiny / "kills"


def test_two_processes_of_this_machine_pass_every_check(tiny: Path, call: Call) -> None:
    words = ("parallel.shard=2", "--nproc", "2", "--seconds", "0.01", "--timeout", "240")
    ended = call("doctor", "cluster", "tiny.toml", *words, "--json")
    assert ended.status == 0, ended.err + ended.out
    found = json.loads(ended.out)
    outcomes = {each["check"]: each["outcome"] for each in found["findings"]}
    assert found["ok"]
    assert [check for check, outcome in outcomes.items() if outcome != "ok" and check not in SPEEDS] == []
    exact = {"ranks", "versions", "clocks", "space", "plan memory"}
    assert outcomes.keys() == exact | SPEEDS - {"axis world"}
    assert "checking axis shard" in ended.err
    brief = found["measured"]["brief"]
    assert (brief["shard"], brief["device"], brief["seconds"], brief["timeout_s"]) == (2, "cpu", 0.01, 240)
    assert brief["memory_bytes"] > 0
    assert sorted(path.name for path in tiny.iterdir()) == ["corpus", "tiny.toml"]


def test_a_rank_that_is_killed_is_named_and_the_status_is_1(accidents: Path, call: Call) -> None:
    (accidents / "1-clocks").touch()
    ended = call("doctor", "cluster", "--nproc", "2", "--seconds", "0.01", "--timeout", "240")
    assert ended.status == 1
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["rank", "1", "missing", "was", "killed", "by", "signal", "9"] in rows
    assert any(row[:5] == ["clocks", "missing", "rank", "1", f"({socket.gethostname()})"] for row in rows), ended.out
    assert any(row[:3] == ["not", "checked", "missing"] for row in rows)
    assert "do not launch yet" in ended.out


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_when_its_time_is_up(accidents: Path, call: Call) -> None:
    (accidents / "1-process group").write_text("hang")
    ended = call("doctor", "cluster", "--nproc", "2", "--seconds", "0.01", "--timeout", "30", "--json")
    assert ended.status == 1
    found = [each for each in json.loads(ended.out)["findings"] if each["outcome"] != "ok"]
    assert (found[0]["check"], found[0]["outcome"], found[0]["ranks"]) == ("process group", "missing", [1])
    assert "did not begin this step" in found[0]["found"]


def launched(folder: Path, words: list[list[str]]) -> list[subprocess.CompletedProcess[str]]:
    """`ropewalk doctor cluster WORDS` as torchrun starts it, with words for each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(len(words)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ropewalk", "doctor", "cluster"]
    processes = [
        subprocess.Popen(
            [*command, *each],
            cwd=folder,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, each in enumerate(words)
    ]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, out, err)
        for process, (out, err) in zip(processes, said, strict=True)
    ]


def test_a_launched_rank_that_does_not_find_the_recipe_is_named(tiny: Path) -> None:
    first, second = launched(tiny, [["tiny.toml", "--timeout", "240"], ["elsewhere.toml", "--timeout", "240"]])
    assert (first.returncode, second.stdout) == (1, "")
    assert f"ranks  wrong  rank 1 on {socket.gethostname()}: elsewhere.toml" in first.stdout, (
        first.stdout + first.stderr
    )


@pytest.mark.slow
def test_launched_ranks_find_folders_that_are_not_shared(tiny: Path) -> None:
    for name in ("here", "there"):
        (tiny / name).mkdir()
    words = ["--seconds", "0.01", "--timeout", "240"]
    first, second = launched(tiny, [["--runs", "here", *words], ["--runs", "there", *words]])
    assert (first.returncode, second.returncode, second.stdout) == (1, 0, ""), first.stderr + second.stderr
    assert "storage     missing  rank 1 " in first.stdout
    assert "axis world  " in first.stdout
    assert list((tiny / "here").iterdir()) == []


@pytest.mark.slow
def test_launched_ranks_end_with_the_setting_that_rank_0_refuses(tiny: Path) -> None:
    words = ["tiny.toml", "parallel.tensor=3", "--timeout", "240"]
    ended = launched(tiny, [words, words])
    assert [each.returncode for each in ended] == [2, 2]
    assert all("2 processes do not fit `[parallel]`" in each.stderr for each in ended)


def test_settings_that_do_not_fit_are_refused_before_anything_starts(tiny: Path, call: Call) -> None:
    ended = call("doctor", "cluster", "tiny.toml", "parallel.tensor=2", "--nproc", "3")
    assert ended.status == 2
    assert "3 processes do not fit `[parallel]`" in ended.err


def test_help_describes_the_commands(call: Call) -> None:
    out = call("doctor", "--help").out
    assert "Check a launch: ranks, devices, network, storage" in out
    assert "Measure why steps wait for data" in out
