"""Whatever is damaged is blamed, and nothing else; no remedy destroys what is intact."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import ropewalk
from ropewalk.base.errors import DamagedCheckpoint, DamagedData, DamagedTokenizer, DataError
from ropewalk.base.seal import write_sealed
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.read.load_latest import DiskCheckpoints
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.config.stages import FORMAT, read_stage
from ropewalk.train.loop import train
from tests.checkpoint import hostile
from tests.checkpoint.newest import continued, searched
from tests.checkpoint.shards import flip, state
from tests.checkpoint.test_ranks import Run
from tests.tiny import make_run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in the middle of its steps."""
    folder = tmp_path_factory.mktemp("stopped")
    run = make_run(folder, checkpoint__keep_last=9)
    train(run)
    shutil.rmtree(list_checkpoints(run / "checkpoints")[-1])
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003", "step-00000006"]
    return folder


def copy_of(stopped: Path, folder: Path) -> Path:
    """The run, with data of its own."""
    for name in ("run", "prepared"):
        shutil.copytree(stopped / name, folder / name)
    told = read_stage(folder / "run", "prepare")
    told["result"]["folder"] = str(folder / "prepared")
    write_sealed(folder / "run/stages/prepare.json", {"format": FORMAT, **told})
    return folder / "run"


@pytest.mark.parametrize("file", ["notes-train-00000.tokens", "tokenizer.json"])
def test_damaged_data_are_blamed_and_not_what_was_saved(stopped: Path, tmp_path: Path, file: str) -> None:
    run = copy_of(stopped, tmp_path)
    flip(tmp_path / "prepared" / file, bit=8001)
    with pytest.raises(DamagedTokenizer if file == "tokenizer.json" else DamagedData) as caught:
        train(run)
    message = str(caught.value)
    assert file in message
    assert not re.search("checkpoint|delete|remove", message.replace(str(tmp_path), ""))
    kept = list_checkpoints(run / "checkpoints")
    assert [path.name for path in kept] == ["step-00000003", "step-00000006"]
    assert not any(verify_checkpoint(path) for path in kept)


def test_a_run_does_not_go_on_from_weights_of_another_model(stopped: Path, tmp_path: Path) -> None:
    run = copy_of(stopped, tmp_path)
    newest = run / "checkpoints/step-00000006"
    tree = hostile.unsealed(newest)
    tree["tensors"]["model"].pop("norm.weight")
    hostile.seal(newest, tree)
    train(run)
    assert (run / "checkpoints/step-00000006.damaged").is_dir()
    assert "the weight norm.weight is missing" in (run / "events.jsonl").read_text()


def opens_a_damaged_shard(_: State) -> None:
    raise DamagedData("docs.tokens: damaged shard")


def test_a_damaged_shard_met_while_a_state_is_taken_over_ends_the_search(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, state(step))
    with pytest.raises(DamagedData, match=r"^docs\.tokens: damaged shard$"):
        searched(DiskCheckpoints(tmp_path), fill=opens_a_damaged_shard)


def test_the_same_on_several_ranks(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path / "checkpoints", state(step))
    run = Run(tmp_path)

    def fails(rank: int) -> str:
        with pytest.raises(DamagedData) as caught:
            continued(run.keepers[rank], fill=opens_a_damaged_shard)
        return str(caught.value)

    assert run.each(fails) == ["docs.tokens: damaged shard"] * 2
    assert len(list_checkpoints(tmp_path / "checkpoints")) == 2
    run.close()


def test_every_rank_hears_that_checkpoints_are_damaged(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", state(10))
    flip(tmp_path / "checkpoints/step-00000010/model.safetensors", bit=4001)
    run = Run(tmp_path)

    def fails(rank: int) -> str:
        with pytest.raises(DamagedCheckpoint) as caught:
            continued(run.keepers[rank])
        return str(caught.value)

    for message in run.each(fails):
        assert "model.safetensors: damaged checkpoint" in message
        assert "nothing is deleted" in message
        assert "delete this" not in message
    run.close()


def test_no_remedy_destroys_what_is_intact() -> None:
    """Whoever is told to move a folder away can move it back."""
    told = re.compile(r"[;,] (or )?(delete|remove) (this|its|\{)")
    files = Path(ropewalk.__file__).parent.rglob("*.py")
    assert [f"{file.name}: {hit[0]}" for file in files if (hit := told.search(file.read_text()))] == []


def test_kinds_of_damage_are_one_tree() -> None:
    assert not issubclass(DamagedData, DamagedCheckpoint)
    assert all(issubclass(kind, DataError) for kind in (DamagedData, DamagedTokenizer, DamagedCheckpoint))
