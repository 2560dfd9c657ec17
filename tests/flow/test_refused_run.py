"""What a user meets who follows a remedy: a run that is refused stays as it was, and pipes are never waited for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.base.errors import DamagedFile, RunConflict

from .tiny import write_tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_tiny(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        flow.train("tiny.toml", ["train.seed=9"])
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "tiny"


def test_a_config_that_was_moved_away_is_written_by_the_right_command_alone(here: Path) -> None:
    (here / "config.toml").rename(here / "config.old")
    with pytest.raises(RunConflict):
        flow.train("tiny.toml")
    assert not (here / "config.toml").exists()
    flow.train("tiny.toml", ["train.seed=9"])
    assert (here / "config.toml").exists()


@pytest.mark.parametrize("name", ["config.toml", "plan.json", "stages/train.json", "summary.json"])
def test_a_pipe_in_place_of_a_file_is_named_and_not_waited_for(here: Path, name: str) -> None:
    (here / name).unlink(missing_ok=True)
    os.mkfifo(here / name)
    value, lines = flow.monitor(here)
    assert any(Path(name).name in line and "not a regular file" in line for line in lines), lines
    assert any("not a regular file" in line for line in value["missing"])
    if name == "config.toml":
        with pytest.raises(DamagedFile, match=r"config\.toml: not a regular file"):
            flow.train("tiny.toml", ["train.seed=9"])
    else:
        flow.train("tiny.toml", ["train.seed=9"])  # what can be made anew is


def test_monitor_names_what_is_damaged(here: Path) -> None:
    path = here / "stages" / "train.json"
    path.write_bytes(path.read_bytes().replace(b"tiny", b"tinz", 1).replace(b'"stage"', b'"stagf"', 1))
    _, lines = flow.monitor(here)
    assert any(line.split()[0] == "damaged" and "stages/train.json" in line for line in lines), lines
