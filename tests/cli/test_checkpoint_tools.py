"""`ropewalk checkpoint reshard | export | prune` on a trained run, and `list` and `verify` of what is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.read.load import load
from tests.checkpoint import hostile

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
        (["--ranks", "4", "--mesh", "3x2"], "--mesh 3x2 has 6 ranks, but --ranks is 4"),
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


def test_list_shows_every_checkpoint_when_a_manifest_is_damaged(trained: Path, call: Call) -> None:
    older, newest = list_checkpoints(RUN / "checkpoints")
    flip(newest / "manifest.json")
    ended = call("checkpoint", "list", RUN)
    assert ended.status == 2
    assert [line.split()[0] for line in ended.out.splitlines()] == [str(older), str(newest)]
    assert ["damaged" in line for line in ended.out.splitlines()] == [False, True]
    assert f"use an older checkpoint, {older}, or move {newest} away" in ended.err
    ended = call("checkpoint", "list", RUN, "--json")
    rows = json.loads(ended.out)
    assert ended.status == 2
    assert [(row["path"], row["step"], bool(row["damaged"])) for row in rows] == [
        (str(older), 4, False),
        (str(newest), 6, True),
    ]


def test_list_shows_a_checkpoint_that_has_lost_its_manifest(trained: Path, call: Call) -> None:
    newest = list_checkpoints(RUN / "checkpoints")[-1]
    (newest / "manifest.json").unlink()
    ended = call("checkpoint", "list", RUN)
    assert ended.status == 2
    assert f"{newest}  step 6, damaged" in ended.out


def test_verify_shows_the_whole_ones_beside_the_damaged(trained: Path, call: Call) -> None:
    older, newest = list_checkpoints(RUN / "checkpoints")
    flip(newest / "model.safetensors")
    ended = call("checkpoint", "verify", RUN)
    assert ended.status == 2
    assert ended.out.splitlines() == [f"{older}: whole", f"{newest}: damaged"]
    assert f"use an older checkpoint, {older}, or move {newest} away" in ended.err
    wrong = json.loads(call("checkpoint", "verify", RUN, "--json").out)
    assert {path: bool(messages) for path, messages in wrong.items()} == {str(older): False, str(newest): True}
    assert "run directory: all" in call("checkpoint", "verify", "--help").out


def test_verify_does_not_point_to_another_damaged_checkpoint(trained: Path, call: Call) -> None:
    for path in list_checkpoints(RUN / "checkpoints"):
        flip(path / "model.safetensors")
    ended = call("checkpoint", "verify", RUN)
    assert "use an" not in ended.err
    assert f"no other checkpoint is whole; move {RUN / 'checkpoints'} away" in ended.err
    shutil.move(RUN / "checkpoints", "away")
    assert call("run", "tiny.toml").status == 0
    assert call("checkpoint", "verify", RUN).status == 0


def test_an_older_damaged_checkpoint_points_to_the_newest(trained: Path, call: Call) -> None:
    older, newest = list_checkpoints(RUN / "checkpoints")
    flip(older / "model.safetensors")
    ended = call("generate", older, "--prompt", "def")
    assert ended.err.rstrip().endswith(f"use another checkpoint, {newest}")


@pytest.mark.parametrize("verb", [["generate", RUN, "--prompt", "def"], ["model", "export", RUN, "out"]])
def test_both_remedies_for_a_damaged_newest_checkpoint_work(trained: Path, call: Call, verb: list[str]) -> None:
    older, newest = list_checkpoints(RUN / "checkpoints")
    right = (newest / "model.safetensors").read_bytes()
    flip(newest / "model.safetensors")
    ended = call(*verb)
    assert ended.status == 2
    assert f"use an older checkpoint, {older}, or move {newest} away" in ended.err
    assert ended.err.rstrip().endswith("trains from step 4")
    assert call(*(older if word == RUN else word for word in verb)).status == 0
    shutil.move(newest, "away")
    again = call("run", "tiny.toml")
    assert again.status == 0
    assert f"continuing from {older}" in again.err
    assert (newest / "model.safetensors").read_bytes() == right


@pytest.mark.parametrize("verb", ["run", "evaluate"])
def test_a_trained_run_with_a_damaged_newest_checkpoint_goes_back_by_itself(
    trained: Path, call: Call, verb: str
) -> None:
    older, newest = list_checkpoints(RUN / "checkpoints")
    right = (newest / "model.safetensors").read_bytes()
    flip(newest / "model.safetensors")
    ended = call(verb, "tiny.toml", "evaluate.samples=3")
    assert ended.status == 0, ended.err
    assert "the newest checkpoint is damaged" in ended.err
    assert f"continuing from {older}" in ended.err
    assert (newest / "model.safetensors").read_bytes() == right
    assert newest.with_name(newest.name + ".damaged").is_dir()


def test_a_trained_run_without_a_whole_checkpoint_says_how_to_begin_anew(trained: Path, call: Call) -> None:
    for path in list_checkpoints(RUN / "checkpoints"):
        flip(path / "model.safetensors")
    ended = call("evaluate", "tiny.toml", "evaluate.samples=3")
    assert ended.status == 2
    assert "no checkpoint is whole, and nothing is deleted" in ended.err


def test_verify_and_the_verbs_that_read_refuse_a_checkpoint_that_holds_another_model(trained: Path, call: Call) -> None:
    newest = list_checkpoints(RUN / "checkpoints")[-1]
    tree = hostile.unsealed(newest)
    tree["spec"]["layers"] += 1
    hostile.seal(newest, tree)
    for verb in (
        ["checkpoint", "verify", newest],
        ["generate", newest, "--prompt", "def"],
        ["checkpoint", "export", newest, "out"],
        ["checkpoint", "reshard", newest, "many", "--ranks", "2"],
    ):
        ended = call(*verb)
        assert ended.status == 2, verb
        assert "the weight blocks." in ended.err


def flip(file: Path) -> None:
    """Changes one bit of a file, in its last byte but two (the last ones of a manifest are white space)."""
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
