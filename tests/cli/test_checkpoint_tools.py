"""`ropewalk checkpoint reshard | export | prune` on a trained run, and `verify` of what they leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.tensors import load

from .conftest import Call

RUN = Path("runs/tiny")


def test_a_resharded_checkpoint_is_whole_and_generates_the_same_text(trained: Path, call: Call) -> None:
    ended = call("checkpoint", "reshard", RUN, "many", "--ranks", "6", "--mesh", "3x2", "--json")
    told = json.loads(ended.out)
    assert ended.status == 0, ended.err
    assert (told["mesh"], told["step"], told["files"]) == ([3, 2], 6, 6 * 2 + 1)
    assert read_checkpoint_manifest(Path(told["checkpoint"])).world == 6
    assert call("checkpoint", "verify", told["checkpoint"]).status == 0
    texts = [call("generate", place, "--prompt", "def", "--tokens", "8").out for place in (RUN, "many")]
    assert texts[0] == texts[1]
    assert load(Path(told["checkpoint"])).step == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "4", "--mesh", "3x2"], "--mesh 3x2 has 6 ranks and --ranks says 4"),
        (["--ranks", "4", "--mesh", "2,2"], "--mesh 2,2: not a mesh; write it as 2x4"),
        (["--ranks", "4", "--mesh", "0x4"], "--mesh 0x4: not a mesh"),
    ],
    ids=["product", "commas", "zero"],
)
def test_a_mesh_that_does_not_fit_is_refused(trained: Path, call: Call, arguments: list[str], words: str) -> None:
    ended = call("checkpoint", "reshard", RUN, "many", *arguments)
    assert ended.status == 2
    assert words in ended.err
    assert not Path("many").exists()


def test_an_existing_folder_is_not_written_to(trained: Path, call: Call) -> None:
    Path("many").mkdir()
    Path("many/mine").write_text("x")
    assert "many: exists" in call("checkpoint", "reshard", RUN, "many", "--ranks", "2").err
    assert [path.name for path in Path("many").iterdir()] == ["mine"]


def test_prune_tells_what_would_go_and_then_deletes_it(trained: Path, call: Call) -> None:
    before = list_checkpoints(RUN / "checkpoints")
    assert len(before) == 2
    tried = json.loads(call("checkpoint", "prune", RUN, "--keep-last", "1", "--dry-run", "--json").out)
    assert tried["gone"] == [str(before[0])]
    assert list_checkpoints(RUN / "checkpoints") == before
    ended = call("checkpoint", "prune", RUN, "--keep-last", "1")
    assert "deleted" in ended.out
    assert list_checkpoints(RUN / "checkpoints") == before[1:]
    assert call("checkpoint", "prune", "elsewhere").status == 2
    assert not Path("elsewhere").exists()


def test_export_is_that_of_model_export(trained: Path, call: Call) -> None:
    assert call("checkpoint", "export", RUN, "here", "--json").status == 0
    assert call("model", "export", RUN, "there").status == 0
    files = [{path.name: path.read_bytes() for path in Path(name).iterdir()} for name in ("here", "there")]
    assert files[0] == files[1]
