"""`new --start-from`: a recipe that fine-tunes a model that is there, with at most one edited line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from ropewalk import flow
from ropewalk.base.errors import DataError
from ropewalk.config.read import flatten
from ropewalk.flow.run_or_recipe import resolve_recipe
from ropewalk.plan.speed import Speed

from .tiny import write_tiny

SPEED = Speed(device="cpu", flops=240e9, words="two cores", bf16=False)
QUICK = ["train.steps=3", "train.batch_size=2", "evaluate.samples=1", "prepare.workers=1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tiny(folder)
        flow.train("tiny.toml", ["train.steps=2"])
        flow.export_model(Path("runs/tiny"), Path("tiny-hf"))
    return folder


@pytest.fixture(autouse=True)
def place(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(base, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    rows = [[("user", f"What is {topic}?"), ("assistant", text[:3000])] for topic, text in sorted(topics.items())]
    lines = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in rows]
    Path("chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def values() -> dict[str, object]:
    return dict(flatten(resolve_recipe(Path("chats.toml")).value))


@pytest.mark.parametrize("start", ["runs/tiny", "tiny-hf"])
def test_shape_and_tokenizer_are_those_of_the_model(start: str) -> None:
    written = flow.new_recipe(Path("chats.toml"), data=["chats.jsonl"], start_from=start, speed=SPEED)
    found, tiny = values(), dict(flatten(resolve_recipe(Path("tiny.toml")).value))
    assert (found["model.width"], found["load.sequence_length"]) == (tiny["model.width"], tiny["load.sequence_length"])
    assert found["train.steps"] == written.sizing.settings["train.steps"].value
    text = Path("chats.toml").read_text()
    assert "\nwidth = " not in text
    assert "\nvocab_size = " not in text
    assert 1 < written.sizing.epochs <= 3.5
    assert f"parameters from {start}" in text.split("\n\n")[0]
    assert any("[train.lora]" in note for note in written.notes)


def test_one_edited_line_makes_it_lora() -> None:
    flow.new_recipe(Path("chats.toml"), data=["chats.jsonl"], start_from="tiny-hf", speed=SPEED)
    Path("chats.toml").write_text(Path("chats.toml").read_text().replace("\n#[train.lora]\n", "\n[train.lora]\n"))
    assert values()["train.lora.rank"] == 8
    flow.check(Path("chats.toml"))
    summary = flow.run("chats.toml", QUICK)
    assert summary["steps"] == 3
    assert summary["tokens"] == 3 * 2 * values()["load.sequence_length"]


def test_less_time_means_fewer_steps() -> None:
    slow = Speed(device="cpu", flops=1e7, words="slow", bf16=False)
    quick = flow.new_recipe(Path("chats.toml"), data=["chats.jsonl"], start_from="tiny-hf", speed=SPEED)
    less = flow.new_recipe(Path("chats.toml"), data=["chats.jsonl"], start_from="tiny-hf", speed=slow, force=True)
    assert (quick.sizing.limited_by, less.sizing.limited_by) == ("data", "time")
    assert less.sizing.tokens < quick.sizing.tokens


def test_a_model_that_is_not_there_is_told_before_anything_is_written() -> None:
    with pytest.raises(DataError, match="no such folder"):
        flow.new_recipe(Path("chats.toml"), data=["chats.jsonl"], start_from="nowhere", speed=SPEED)
    assert not Path("chats.toml").exists()
