"""One changed digit in a file of a run: made anew, or refused by name with its remedy. Never silent, never a bug."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.base.errors import DamagedFile, DataError
from ropewalk.base.seal import sealed_json
from ropewalk.config.resolved import load_value
from ropewalk.monitor.run_view import read_run
from ropewalk.plan.plan import load_plan
from ropewalk.store.manifest import read_manifest
from ropewalk.train.settings import read_settings
from tests.flow.tiny import write_tiny

RUN = Path("runs/tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, made once."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tiny(folder)
        flow.run("tiny.toml")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to damage."""
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return RUN


def edit(path: Path, pattern: str, instead: str) -> bytes:
    """Changes the first match, as a flipped bit or a hand would; what the file was before."""
    before = path.read_bytes()
    text, count = re.subn(pattern, instead, before.decode(), count=1)
    assert count == 1, f"{path} has no {pattern}"
    path.write_text(text, encoding="utf-8")
    return before


def manifest_path() -> Path:
    return next(Path("prepared").glob("*/manifest.json"))


def test_a_changed_weight_of_a_source_is_refused_by_name_and_prepared_again(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = manifest_path()
    before = edit(path, r'"weight": \d', '"weight": 9')
    with pytest.raises(DamagedFile, match=r"manifest\.json: this manifest is damaged.*changed in the recipe"):
        read_manifest(path.parent)
    flow.run("tiny.toml", until="plan")
    assert path.read_bytes() == before


def test_a_manifest_of_other_data_under_this_name_is_noticed(run: Path) -> None:
    path = manifest_path()
    before = path.read_bytes()
    other = flow.prepare("tiny.toml", ["name=other", "seed=8"])
    path.write_bytes((Path(other["folder"]) / "manifest.json").read_bytes())
    flow.run("tiny.toml", until="plan")
    assert path.read_bytes() == before


@pytest.mark.parametrize("change", [('"tensor": 1', '"tensor": 2'), ('"chunks": 1', '"chunks": 2')])
def test_a_changed_plan_is_refused_by_a_worker_and_made_anew_by_run(run: Path, change: tuple[str, str]) -> None:
    before = edit(run / "plan.json", *change)
    with pytest.raises(DamagedFile, match=r"plan\.json: this plan is damaged.*`ropewalk run`"):
        load_plan(run)
    flow.run("tiny.toml", until="plan")
    assert (run / "plan.json").read_bytes() == before


def test_a_sound_plan_of_another_layout_is_noticed(run: Path) -> None:
    before = (run / "plan.json").read_bytes()
    flow.run("tiny.toml", ["name=other", "plan.microbatch_size=1"], until="plan")
    shutil.copy("runs/other/plan.json", run / "plan.json")
    flow.run("tiny.toml", until="plan")
    assert (run / "plan.json").read_bytes() == before


@pytest.mark.parametrize("stage", ["prepare", "plan", "train", "evaluate"])
def test_a_changed_record_of_a_stage_is_made_anew_and_keeps_what_was_made(run: Path, stage: str) -> None:
    path = run / "stages" / f"{stage}.json"
    before = json.loads(edit(path, '"input"', '"inp}t"'))
    weights = [file.read_bytes() for file in sorted(run.glob("checkpoints/*/model.safetensors"))]
    if stage == "prepare":
        with pytest.raises(DamagedFile, match=r"prepare\.json: this record of a stage is damaged.*`ropewalk run`"):
            read_settings(run)
    flow.run("tiny.toml")
    after = json.loads(path.read_text())
    assert (after["input"], after["stage"]) == (before["input"], stage)
    assert [file.read_bytes() for file in sorted(run.glob("checkpoints/*/model.safetensors"))] == weights


def test_a_record_under_the_name_of_another_stage_is_noticed(run: Path) -> None:
    shutil.copy(run / "stages/plan.json", run / "stages/prepare.json")
    with pytest.raises(DamagedFile, match="it is the record of plan"):
        read_settings(run)
    assert flow.run("tiny.toml", until="plan")


def test_a_changed_config_is_refused_where_there_is_a_checkpoint_to_lose(run: Path) -> None:
    edit(run / "config.toml", "width = 32", "width = 33")
    for read in (lambda: load_value(run, "seed"), lambda: flow.run("tiny.toml")):
        with pytest.raises(DamagedFile, match=r"config\.toml: this resolved config is damaged.*settings in the recipe"):
            read()
    (run / "config.toml").unlink()  # as the message says
    assert flow.run("tiny.toml")["seed"] == 7


def test_a_changed_config_of_a_run_without_checkpoints_is_written_anew(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    before = edit(run / "config.toml", "width = 32", "width = 33")
    flow.run("tiny.toml", until="plan")
    assert (run / "config.toml").read_bytes() == before


@pytest.mark.parametrize("name", ["evaluation/results.json", "samples.jsonl", "summary.json"])
def test_damaged_results_are_left_out_by_name_and_measured_again(run: Path, name: str) -> None:
    path = run / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert [line for line in read_run(run).missing if name in line]
    flow.run("tiny.toml")
    assert not [line for line in read_run(run).missing if name in line]


@pytest.mark.parametrize("damage", [lambda data: data[:-5] + b"9" + data[-4:], lambda data: b""], ids=["bit", "empty"])
def test_damaged_scores_of_documents_are_measured_again(run: Path, damage: Callable[[bytes], bytes]) -> None:
    path = run / "evaluation" / "documents.jsonl"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    flow.run("tiny.toml")
    assert path.read_bytes() == before


def test_files_of_earlier_versions_are_read_with_one_warning(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path, old in ((run / "plan.json", 2), (manifest_path(), 2)):
        tree = json.loads(path.read_text()) | {"format": old}
        del tree["seal"]
        tree.pop("tables", None)
        path.write_text(json.dumps(tree))
    before = (run / "plan.json").read_bytes(), manifest_path().read_bytes()
    flow.run("tiny.toml")
    flow.run("tiny.toml")
    for path in (run / "plan.json", manifest_path()):
        said = [record for record in caplog.records if str(path) in record.getMessage()]
        assert len(said) == 1, [record.getMessage() for record in said]
    assert ((run / "plan.json").read_bytes(), manifest_path().read_bytes()) == before


def test_a_file_of_a_newer_version_is_not_taken_for_damage(run: Path) -> None:
    tree = json.loads(manifest_path().read_text()) | {"format": 99}
    del tree["seal"]
    path = manifest_path()
    path.write_bytes(sealed_json(tree))
    with pytest.raises(DataError, match="upgrade ropewalk"):
        flow.run("tiny.toml")
    assert json.loads(path.read_text())["format"] == 99


def test_older_samples_beside_newer_results_are_drawn_again(run: Path) -> None:
    before = (run / "samples.jsonl").read_bytes()
    flow.run("tiny.toml", ["name=other", "seed=8"])
    shutil.copy("runs/other/samples.jsonl", run / "samples.jsonl")
    flow.run("tiny.toml")
    assert (run / "samples.jsonl").read_bytes() == before
