"""The command line, called in process, beside a tiny recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ropewalk.cli.main import main
from tests.flow.tiny import write_tiny


@dataclass(frozen=True)
class Ended:
    """How a call ended."""

    status: int
    out: str
    err: str


Call = Callable[..., Ended]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        try:
            main([str(argument) for argument in arguments])
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return Ended(status, captured.out, captured.err)

    return run


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with `tiny.toml` and its corpus; we stand in it."""
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny recipe; copy it before changing it."""
    folder = tmp_path_factory.mktemp("trained")
    write_tiny(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(SystemExit) as stop:
            main(["run", "tiny.toml", "--json"])
    assert not stop.value.code
    return folder


@pytest.fixture
def trained(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of a finished run; we stand in its folder."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(trained_once, copy)
    monkeypatch.chdir(copy)
    return copy
