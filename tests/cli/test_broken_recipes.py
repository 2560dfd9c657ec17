"""Whatever is wrong with a recipe, its data or its storage: the place, the reason, a remedy, exit 2, nothing lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from ropewalk.base.seal import sealed_json

from .conftest import Call, Ended


def edit(recipe: Path, old: str, new: str) -> None:
    text = recipe.read_text()
    assert old in text
    recipe.write_text(text.replace(old, new))


def line_of(recipe: Path, text: str) -> int:
    return next(n for n, line in enumerate(recipe.read_text().splitlines(), 1) if text in line)


def weights(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted((folder / "runs").rglob("*.safetensors"))}


def refused(ended: Ended, *fragments: str) -> None:
    """The call ended with status 2 and said all of `fragments`, without a traceback."""
    assert ended.status == 2, ended
    assert "Traceback" not in ended.err
    for fragment in fragments:
        assert fragment in ended.err, (fragment, ended.err)


@pytest.mark.parametrize(
    ("old", "new", "fragments"),
    [
        ("steps = 6", "stepps = 6", ["unknown key `train.stepps`", "did you mean `steps`?"]),
        ('name = "tiny"', f'name = "{"y" * 300}"', ["300 bytes are too many to name a folder; use at most 200"]),
        ("width = 32", 'width = "wide"', ['`model.width` is "wide"', "expected integer"]),
        ("width = 32", "width = 2", ["`model.width` is 2", "at least 8"]),
        ("threads = 1", 'precision = "double"', ['"double"', '"fp32"', '"bf16"']),
        ("heads = 2", "heads = 3", ["3 heads do not divide the width 32"]),
        ("warmup_steps = 2", "warmup_steps = 9", ["9 warm-up steps exceed the 6 steps"]),
        ("threads = 1", "batch_ramp = {from_size = 2, over_steps = 600}", ["within the 6 steps of the run"]),
        ("microbatch_size = 2", "microbatch_size = 3", ["3 does not divide `train.batch_size` (4)"]),
        ('paths = ["corpus/*.txt"]', 'paths = ["corpse/*.txt"]', ['nothing matches "corpse/*.txt"', "working folder"]),
        ('name = "notes"', 'name =  "code"', ['two sources are named "code"']),
        ("vocab_size = 300", 'file = "no.json"', ['no file "no.json"', "train a tokenizer"]),
        ("min_characters = 50", 'words.files = ["bad.txt"]', ['no file "bad.txt"', "write the list"]),
        ("[load]", "[load", ["not valid TOML", "[load"]),
    ],
)
def test_a_mistake_in_a_recipe_is_told_with_its_line(
    old: str, new: str, fragments: list[str], tiny: Path, call: Call
) -> None:
    edit(tiny / "tiny.toml", old, new)
    ended = call("run", "tiny.toml")
    refused(ended, f"tiny.toml:{line_of(tiny / 'tiny.toml', new)}:", *fragments)
    assert not (tiny / "runs").exists()


@pytest.mark.parametrize("verb", [["recipe", "check"], ["recipe", "upgrade"], ["plan"], ["prepare"]], ids=" ".join)
def test_a_pipe_or_a_device_in_place_of_a_recipe_is_never_waited_for(tiny: Path, call: Call, verb: list[str]) -> None:
    for name, make in (("fifo.toml", os.mkfifo), ("zero.toml", lambda path: os.symlink("/dev/zero", path))):
        if not os.path.lexists(name):
            make(name)
        refused(call(*verb, name), f"{name}: not a regular file; name a .toml file")


def test_a_zero_character_in_a_path_is_told_with_its_line(tiny: Path, call: Call) -> None:
    edit(tiny / "tiny.toml", "corpus/*.txt", "corpus/\\u0000.txt")
    refused(call("prepare", "tiny.toml"), f"tiny.toml:{line_of(tiny / 'tiny.toml', 'u0000')}:", "leave out the zero")


@pytest.mark.parametrize("place", ["runs/tiny", "prepared/*", "prepared/stages"])
def test_a_pipe_in_place_of_a_lock_is_never_waited_for(trained: Path, call: Call, place: str) -> None:
    for lock in (found := list(trained.glob(f"{place}/.lock"))):
        lock.unlink()
        os.mkfifo(lock)
    assert found
    for manifest in trained.glob("prepared/*/manifest.json"):
        manifest.unlink()  # so that it is prepared again
    refused(call("run", "tiny.toml"), ".lock: not a regular file; move it away")
    assert call("monitor", "runs/tiny").status == 0


def test_all_mistakes_are_told_at_once(tiny: Path, call: Call) -> None:
    recipe = tiny / "tiny.toml"
    edit(recipe, "layers = 2", "layres = 2")
    edit(recipe, "steps = 6", 'steps = "six"')
    edit(recipe, "heads = 2", "heads = 5")
    ended = call("recipe", "check", "tiny.toml", "load.sequence_length=1", "evaluate.sample=3")
    refused(ended, "`layers`?", '"six"', "5 heads do not divide", "at least 8", "`samples`?", "command line")
    assert len(ended.err.strip().splitlines()) == 5


@pytest.mark.parametrize(
    ("written", "line", "fragment"),
    [
        ('recompute = "full"\nsaved_activations = "8-bit"', 'saved_activations = "8-bit"', "drop one of them"),
        ("tensor = 3", "tensor = 3", "3"),
        ("replicate = 3", "", "cannot share `train.batch_size` (4) evenly"),
    ],
)
def test_what_cannot_be_planned_is_told_before_anything_is_prepared(
    written: str, line: str, fragment: str, tiny: Path, call: Call
) -> None:
    recipe = tiny / "tiny.toml"
    edit(recipe, "[checkpoint]", f"[parallel]\n{written}\n[checkpoint]")
    place = f"tiny.toml:{line_of(recipe, line or 'batch_size = 4')}: "
    for verb in (["recipe", "check"], ["run"], ["train"]):
        refused(call(*verb, "tiny.toml"), place, fragment)
    assert not (tiny / "prepared").exists()
    assert not (tiny / "runs").exists()


def test_a_recipe_for_another_machine_is_sound(tiny: Path, call: Call) -> None:
    """With a GPU, or more memory than here."""
    here = "plan.device=cuda", "model.layers=4096", "model.width=65536"
    assert call("recipe", "check", "tiny.toml", *here).status == 0
    ended = call("run", "tiny.toml", "plan.device=cpu", *here[1:])
    refused(ended, "needed", "choose a smaller model")
    assert not (tiny / "prepared").exists()


def test_a_recipe_without_sources_says_what_to_add(tiny: Path, call: Call) -> None:
    (tiny / "empty.toml").write_text('name = "empty"\n')
    refused(call("run", "empty.toml"), "`prepare.sources`", "add a [[prepare.sources]] table", "[[load.corpus]]")


def test_a_recipe_that_is_not_there_suggests_one_that_is(tiny: Path, call: Call) -> None:
    refused(call("run", "tinny.toml"), "tinny.toml: no such recipe", "did you mean `tiny.toml`?")


def test_a_damaged_shard_is_named(tiny: Path, call: Call) -> None:
    assert call("prepare", "tiny.toml").status == 0
    shard = next((tiny / "prepared").rglob("code-train-*.tokens"))
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    ended = call("run", "tiny.toml")
    refused(ended, str(shard.name), "damaged shard", "`ropewalk prepare`")


def test_a_full_disk_keeps_what_was_saved_and_the_same_command_continues(
    tiny: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        if "step-00000004" in os.readlink(f"/proc/self/fd/{descriptor}"):
            calls.append(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        # In the background the failure may be noticed when the next step is saved already.
        ended = call("run", "tiny.toml", "checkpoint.failures=0", "checkpoint.write=blocking")
    assert calls
    refused(ended, "step-00000004", "No space left on device", "free some space", "same command")
    kept = [path.name for path in sorted((tiny / "runs/tiny/checkpoints").iterdir())]
    assert kept == ["latest.json", "step-00000002"]
    assert call("run", "tiny.toml").status == 0


def test_a_read_only_folder_is_told_with_another_way(tiny: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", read_only)
    refused(call("run", "tiny.toml"), "Read-only file system", "--runs")


def test_settings_that_make_another_model_do_not_overwrite_a_trained_one(trained: Path, call: Call) -> None:
    before = weights(trained)
    ended = call("run", "tiny.toml", "model.layers=3", "train.log_every_steps=1")
    refused(ended, "model.layers: 2 -> 3", "another `name`", "--new")
    assert "log_every_steps" not in ended.err
    assert weights(trained) == before


def test_new_input_files_do_not_overwrite_a_trained_model(trained: Path, call: Call) -> None:
    before = weights(trained)
    (trained / "corpus" / "more.txt").write_text("a new document about rope and how it is laid\n" * 9)
    refused(call("run", "tiny.toml"), "files that this run was trained on have changed", "--new")
    assert weights(trained) == before


def test_new_sets_the_old_run_aside(trained: Path, call: Call) -> None:
    before = weights(trained)
    assert call("run", "tiny.toml", "model.layers=1", "--new").status == 0
    assert {
        key.replace("/tiny.1/", "/tiny/"): value for key, value in weights(trained).items() if "tiny.1" in key
    } == before


def test_a_run_in_use_is_left_alone(trained: Path, call: Call) -> None:
    with open(trained / "runs/tiny/.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(call("run", "tiny.toml"), "is writing here")
        refused(call("run", "tiny.toml", "--new"), "is writing here")


def test_a_damaged_checkpoint_is_named_and_an_older_one_is_used(trained: Path, call: Call) -> None:
    newest = sorted((trained / "runs/tiny/checkpoints").iterdir())[-1]
    file = newest / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    refused(call("checkpoint", "verify", "runs/tiny"), str(file.relative_to(trained)), "damaged checkpoint")
    refused(call("generate", str(newest.relative_to(trained))), "model.safetensors", "use an older checkpoint")
    (trained / "runs/tiny/stages/train.json").unlink()
    ended = call("run", "tiny.toml")
    assert ended.status == 0
    assert "continuing from an older one" in ended.err
    assert call("checkpoint", "verify", "runs/tiny").status == 0


def test_a_manifest_of_a_newer_version_asks_for_an_upgrade(tiny: Path, call: Call) -> None:
    assert call("prepare", "tiny.toml").status == 0
    manifest = next((tiny / "prepared").rglob("manifest.json"))
    tree = json.loads(manifest.read_text()) | {"format": 99}
    del tree["seal"]
    manifest.write_bytes(sealed_json(tree))
    refused(call("train", "tiny.toml"), "manifest.json", "format 99", "upgrade ropewalk")


def test_a_corpus_too_small_for_a_row_says_so(tiny: Path, call: Call) -> None:
    refused(call("train", "tiny.toml", "load.sequence_length=5000", "evaluate.prompt_tokens=8"), "tokens", "5000")


def test_a_model_too_large_for_the_memory_is_told_before_training(tiny: Path, call: Call) -> None:
    refused(call("plan", "tiny.toml", "plan.memory_bytes=1000000", "model.width=256"), "MB needed", "optimizer")


def test_errors_are_json_too(tiny: Path, call: Call) -> None:
    ended = call("run", "nothing.toml", "--json")
    refused(ended)
    assert '"error": "ConfigError"' in ended.out


def test_a_folder_whose_name_is_too_long_is_refused(tiny: Path, call: Call) -> None:
    refused(call("train", "tiny.toml", "--runs", "y" * 300), "File name too long: choose a shorter name or folder")


IMAGES = '[[load.media]]\nname = "photos"\npath = "shards"\n'


@pytest.mark.parametrize("words", [("train",), ("run",), ("recipe", "check")])
def test_a_source_of_images_is_refused_by_what_would_ignore_it(tiny: Path, call: Call, words: tuple[str, ...]) -> None:
    recipe = tiny / "tiny.toml"
    recipe.write_text(recipe.read_text() + IMAGES)
    line = line_of(recipe, 'name = "photos"')
    told = f'tiny.toml:{line}: `load.media`: training reads tokens; no model here reads the images of "photos"'
    refused(call(*words, "tiny.toml"), told, "remove the table")
    assert not Path("runs").exists()


def test_data_are_prepared_whatever_images_a_recipe_names(tiny: Path, call: Call) -> None:
    recipe = tiny / "tiny.toml"
    recipe.write_text(recipe.read_text() + IMAGES)
    ended = call("prepare", "tiny.toml")
    assert ended.status == 0, ended.err
