"""Recipes that `new` writes: they can be read, checked and trained."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.base.errors import UserError
from ropewalk.config.read import flatten
from ropewalk.flow.new.new_recipe import Written
from ropewalk.plan.speed import Speed
from ropewalk.prepare.config import Source

from .tiny import WORDS

SPEED = Speed(device="cpu", flops=240e9, words="two cores, 120 GFLOP/s a core measured", bf16=False)
QUICK = ["train.steps=4", "train.batch_size=2", "evaluate.samples=1", "evaluate.max_new_tokens=8", "prepare.workers=1"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sentences(count: int, draw: random.Random) -> str:
    return " ".join(" ".join(draw.choices(WORDS, k=8)) + "." for _ in range(count))


def play(speeches: int) -> str:
    draw = random.Random(0)
    return "\n".join(
        f"{name.upper()}:\n{sentences(1, draw)}\n{sentences(1, draw)}\n" for name in draw.choices(WORDS, k=speeches)
    )


def chats(count: int) -> str:
    draw = random.Random(1)
    turns = [[("user", f"What is {draw.choice(WORDS)}?"), ("assistant", sentences(2, draw))] for _ in range(count)]
    rows = [{"messages": [{"role": role, "content": content} for role, content in each]} for each in turns]
    return "".join(json.dumps(row) + "\n" for row in rows)


def new(*data: str, **options: object) -> Written:
    return flow.new_recipe(Path("mine.toml"), data=data, speed=SPEED, force=True, **options)


def values() -> dict[str, object]:
    """Every setting of the recipe that was written."""
    return dict(flatten(flow.check(Path("mine.toml")).resolved.value))


def test_one_large_file_of_text_is_cut_and_trains_with_nothing_but_its_path() -> None:
    Path("play.txt").write_text(play(12_000))
    assert Path("play.txt").stat().st_size > 1_000_000
    new("play.txt")
    text = Path("mine.toml").read_text()
    assert 'split = "blank-lines"' in text
    assert "in one file: cut at blank lines into about 12,000 documents" in text.replace("\n# -> ", " ")
    # Cut down, so that preparing takes a second: the recipe is that of the whole file.
    Path("play.txt").write_text(play(400))
    small = [
        "model.layers=1",
        "model.width=32",
        "model.heads=1",
        "load.sequence_length=64",
        "prepare.tokenizer.vocab_size=300",
    ]
    summary = flow.run("mine.toml", [*QUICK, *small, "prepare.deduplicate.near.kind=off"])
    assert summary["tokens"] == 4 * 2 * 64


def test_dialogues_get_a_template_and_train() -> None:
    Path("chats.jsonl").write_text(chats(60))
    written = new("chats.jsonl")
    found = values()
    assert (found["prepare.sources.0.format"], found["prepare.chat.template"]) == ("chat", "chatml")
    assert any("train.start_from" in note for note in written.notes)
    summary = flow.run("mine.toml", [*QUICK, "prepare.deduplicate.near.kind=off"])
    assert summary["tokens"] == 4 * 2 * found["load.sequence_length"]


def test_every_setting_of_every_source_is_in_the_recipe_with_its_reason() -> None:
    Path("data").mkdir()
    Path("data/a.jsonl").write_text("".join(json.dumps({"body": play(9)}) + "\n" for _ in range(30)))
    Path("data/chats.jsonl").write_text(chats(30))
    new("data", name="both")
    text = Path("mine.toml").read_text()
    for source in text.split("[[prepare.sources]]")[1:]:
        table = source.split("\n\n")[0]
        missing = [
            name for name in Source.__dataclass_fields__ if f"\n{name} = " not in table and f"\n#{name} = " not in table
        ]
        assert missing == ["limits"]
    assert "# -> the text, about" in text
    assert "# -> found dialogues under `messages`" in text
    found = values()
    assert [found["prepare.sources.0.text_key"], found["prepare.sources.1.format"]] == ["body", "chat"]
    assert found["name"] == "both"


def test_the_head_of_a_recipe_says_what_was_found_and_how_long_it_takes() -> None:
    Path("books").mkdir()
    for number in range(30):
        Path(f"books/{number}.txt").write_text(play(40))
    written = new("books")
    head = Path("mine.toml").read_text().split("\n\n")[0]
    assert "30 files" in head
    assert "about 30 documents" in head
    assert "two cores, 120 GFLOP/s a core measured" in head
    assert written.tree()["settings"]["train.steps"] == values()["train.steps"]
    assert written.sizing.limited_by == "data"


def test_hours_and_a_gpu_change_the_size() -> None:
    Path("data").mkdir()
    for number in range(20):
        Path(f"data/{number}.txt").write_text(play(4000 + number))
    short, long = new("data").sizing, new("data", hours=3).sizing
    assert short.parameters < long.parameters
    gpu = Speed(device="cuda", flops=1e14, words="a GPU", bf16=True, memory_bytes=24 << 30)
    written = flow.new_recipe(Path("gpu.toml"), data=["data"], gpu=True, speed=gpu)
    assert written.tree()["device"] == "cuda"
    assert dict(flatten(flow.show(Path("gpu.toml")).value))["plan.device"] == "cuda"


def test_a_time_of_nothing_is_refused() -> None:
    Path("a.txt").write_text(play(3))
    with pytest.raises(UserError, match="--hours"):
        new("a.txt", hours=0.0)


def test_data_in_the_place_of_the_recipe_is_never_written_over() -> None:
    Path("a.txt").write_text(play(3))
    for force in (False, True):
        with pytest.raises(UserError, match=r"the recipe comes first: ropewalk new RECIPE.toml a.txt"):
            flow.new_recipe(Path("a.txt"), data=["r.toml"], force=force)
    assert Path("a.txt").read_text() == play(3)


def test_data_that_is_not_there_and_folders_without_any_are_told_apart() -> None:
    Path("bare").mkdir()
    for path, told in (("none.txt", "none.txt: no such file"), ("bare", "bare: no file is in it")):
        with pytest.raises(UserError, match=told):
            new(path)


def test_a_recipe_is_checked_before_anything_is_prepared() -> None:
    Path("a.jsonl").write_text('{"body": "a rope"}\n')
    Path("r.toml").write_text('name = "r"\n[[prepare.sources]]\nname = "a"\npaths = ["a.jsonl"]\n')
    told = r'r\.toml:4: `prepare\.sources\.0\.text_key`: a\.jsonl: .*set `text_key = "body"`'
    for verb in (flow.run, flow.prepare, flow.check):
        with pytest.raises(UserError, match=told):
            verb(Path("r.toml"))
    assert not Path("prepared").exists()
