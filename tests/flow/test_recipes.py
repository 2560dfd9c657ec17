"""Every recipe of recipes/ trains: from files of the kind that it names, with a smaller model and fewer steps.

tests/test_docs.py checks each as it is.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from ropewalk import flow
from ropewalk.config.read import flatten
from ropewalk.flow.run_or_recipe import resolve_recipe

from .tiny import write_tiny

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
FEWER = ["train.steps=3", "train.batch_size=4", "train.schedule.warmup_steps=1", "train.validate_every_steps=2"]
FEWER += ["train.validation_sequences=4", "prepare.workers=1", "evaluate.samples=2", "evaluate.max_bytes=3000"]
FEWER += ["evaluate.prompt_tokens=8", "evaluate.max_new_tokens=8", "checkpoint.save_every_steps=2", "train.threads=1"]
FEWER += ["prepare.validation_share=0.2"]
SMALLER = ["model.layers=1", "model.width=32", "model.heads=2", "load.sequence_length=32", "plan.device=cpu"]
SMALLER += ["prepare.tokenizer.vocab_size=400", "train.precision=fp32"]
TUNED = ("chat-lora", "continue-hugging-face")
CHINESE = "春眠不覺曉處處聞啼鳥夜來風雨聲花落知多少"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the recipes name, and a small model to start from."""
    folder = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tiny(folder)
        flow.train("tiny.toml", ["train.steps=2"])
        flow.export_model(Path("runs/tiny"), Path("my-llama"))
    Path(folder, "my-book.txt").write_text("\n\n".join(topics.values())[:60_000])
    for number, name in enumerate(sorted(topics)[:40]):
        for kind in ("my-texts", "data"):
            Path(folder, kind).mkdir(exist_ok=True)
            Path(folder, kind, f"{name}.txt").write_text(topics[name][:3000])
        Path(folder, "docs").mkdir(exist_ok=True)
        Path(folder, "docs", f"{name}.md").write_text(topics[name][:3000])
        Path(folder, "my-code").mkdir(exist_ok=True)
        lines = [f"def rope_{number}_{line}(strand):\n    return strand * {line}\n" for line in range(20)]
        Path(folder, "my-code", f"{number}.py").write_text("\n".join(lines))
    poems = [{"text": "".join(CHINESE[(i * j) % 20] for j in range(1, 25)) + f"其{i}"} for i in range(300)]
    Path(folder, "my-chinese.jsonl").write_text("".join(json.dumps(poem, ensure_ascii=False) + "\n" for poem in poems))
    rows = [[("user", f"What is {name}?"), ("assistant", topics[name][:300])] for name in sorted(topics)]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) + "\n" for row in rows]
    Path(folder, "my-dialogues.jsonl").write_text("".join(lines))
    return folder


def test_there_is_a_recipe_for_each_of_six_jobs() -> None:
    jobs = ("one-file-cpu", "code-folder-cpu", "chinese-cpu", "chat-lora", "continue-hugging-face", "gpt2-124m-h200")
    assert {path.stem for path in RECIPES} == {*jobs, "tiny-cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains(recipe: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    overrides = FEWER if recipe.stem in TUNED else [*FEWER, *SMALLER]
    summary = flow.run(recipe, overrides)
    assert summary["steps"] == 3
    assert math.isfinite(summary["bits_per_byte"])
    resolved = resolve_recipe(Path("runs") / recipe.stem)
    settings = dict(flatten(resolved.value))
    if recipe.stem in TUNED:
        base = dict(flatten(resolve_recipe(Path("tiny.toml")).value))
        assert settings["model.width"] == base["model.width"]
    if recipe.stem == "chat-lora":
        assert settings["train.lora.rank"] == 8
    if recipe.stem == "code-folder-cpu":
        assert summary["parse_rate"] is not None
    if recipe.stem == "chinese-cpu":
        assert summary["train_tokens_prepared"] < 2 * 26 * 300  # about a token a character, not three
    if recipe.stem == "one-file-cpu":
        assert summary["documents"] > 5
