"""`ropewalk train --profile`, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

from ropewalk.checkpoint.format import list_checkpoints

from .conftest import Call


def weights(runs: Path) -> bytes:
    return (list_checkpoints(runs / "tiny" / "checkpoints")[-1] / "model.safetensors").read_bytes()


def test_the_table_is_printed_and_the_run_is_the_same(call: Call, tiny: Path) -> None:
    ended = call("train", "tiny.toml", "--profile", "--profile-steps", "3")
    assert ended.status == 0, ended.err
    lines = [line.split() for line in ended.out.splitlines()]
    assert ended.out.startswith("steps 3 to 5 on cpu: ")
    assert ["part", "calls", "ms", "share"] in lines
    assert {"forward", "backward", "update", "aten::mm", "validation_loss"} <= {line[0] for line in lines if line}
    assert "https://ui.perfetto.dev" in ended.err
    profile = tiny / "runs" / "tiny" / "profile"
    assert json.loads((profile / "trace.json").read_text())["traceEvents"]
    assert call("train", "tiny.toml", "--runs", "plain").status == 0
    assert weights(tiny / "plain") == weights(tiny / "runs")


def test_the_table_is_part_of_the_json(call: Call, tiny: Path) -> None:
    ended = call("train", "tiny.toml", "--profile", "--json")
    result = json.loads(ended.out)
    written = json.loads((tiny / "runs" / "tiny" / "profile" / "table.json").read_text())
    assert result["profile"] == written
    assert (result["step"], written["first_step"], written["last_step"]) == (6, 3, 6)
    assert "profile" not in json.loads(call("train", "tiny.toml", "--json").out)


def test_what_cannot_be_profiled_is_said(call: Call, tiny: Path) -> None:
    assert call("train", "tiny.toml").status == 0
    trained = call("train", "tiny.toml", "--profile")
    assert trained.status == 2
    assert "no step is left to profile; start anew with --new" in trained.err
    detached = call("train", "tiny.toml", "--profile-steps", "2", "--detach", "--new")
    assert detached.status == 2
    assert "drop one of them" in detached.err


def test_so_many_steps_are_profiled_without_another_word(call: Call, tiny: Path) -> None:
    assert call("train", "tiny.toml", "--profile-steps", "2").out.startswith("steps 3 to 4 on cpu: ")


def test_several_processes_are_refused_before_anything_is_prepared(call: Call, tiny: Path) -> None:
    ended = call("train", "tiny.toml", "--profile", "--nproc", "2")
    assert ended.status == 2
    assert "--profile supports a single process" in ended.err
    assert not (tiny / "prepared").exists()
