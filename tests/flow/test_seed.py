"""Several runs on the same data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.base.errors import RunConflict
from ropewalk.base.progress import Silent
from ropewalk.checkpoint.format import resolve_checkpoint
from ropewalk.flow.data_doctor import data_probe as examination
from ropewalk.flow.run_or_recipe import given, resolve_recipe
from ropewalk.train.settings import read_settings

from .tiny import write_tiny


def test_another_seed_of_training_keeps_the_data_and_what_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    first, second = flow.run("tiny.toml"), flow.run("tiny.toml", ["name=second", "train.seed=2"])
    assert (first["seed"], first["train_seed"]) == (7, 7)
    assert (second["seed"], second["train_seed"]) == (7, 2)
    prepared = [
        json.loads(Path(f"runs/{name}/stages/prepare.json").read_text())["result"] for name in ("tiny", "second")
    ]
    assert prepared[0]["folder"] == prepared[1]["folder"]
    assert first["evaluated_tokens"] == second["evaluated_tokens"]
    inputs = [json.loads(Path(f"runs/{name}/stages/train.json").read_text())["input"] for name in ("tiny", "second")]
    assert inputs[0] != inputs[1]
    ours, theirs = (resolve_checkpoint(Path("runs") / name) / "model.safetensors" for name in ("tiny", "second"))
    assert ours.read_bytes() != theirs.read_bytes()


def test_another_seed_of_training_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    flow.train("tiny.toml")
    with pytest.raises(RunConflict, match=r"train\.seed"):
        flow.train("tiny.toml", ["train.seed=2"])


@pytest.mark.parametrize("verb", [flow.run, flow.prepare])
def test_a_run_that_is_refused_for_other_files_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[[str], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    flow.run("tiny.toml")

    def state() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path("runs/tiny/stages").iterdir()}

    def prepared() -> list[Path]:
        """All but the remembered checksums: those of files that are two seconds old are written by the next call."""
        return sorted(path for path in Path("prepared").rglob("*") if "checksums" not in path.parts)

    before = state(), prepared()
    Path("corpus/more.txt").write_text("a knot in the cable of the hall\n" * 9)
    with pytest.raises(RunConflict, match="the files that this run was trained on have changed"):
        verb("tiny.toml")
    assert (state(), prepared()) == before
    Path("corpus/more.txt").unlink()
    assert flow.run("tiny.toml")["seed"] == 7


def test_what_looks_at_the_data_reads_the_rows_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    resolved = resolve_recipe("tiny.toml", ["train.seed=2"])
    settings = examination.settings_of(resolved.value, examination.prepared_data(given(resolved), Silent()))
    flow.train("tiny.toml", ["train.seed=2"])
    trained = read_settings(Path("runs/tiny"))
    assert settings.seed == trained.seed == 2
