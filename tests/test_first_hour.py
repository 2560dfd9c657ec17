"""benchmarks/first_hour.py, which walks through the first hour of new users, on small corpora of the same kinds.

Its own corpora are large; run it for the figures of docs/benchmarks.md.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "first_hour.py"
CHINESE = (
    "春眠不覺曉處處聞啼鳥夜來風雨聲花落知多少床前明月光疑是地上霜舉頭望低思故鄉白日依山盡黃河入海流欲窮千里目更一層樓"
)
WORDS = ("the", "rope", "walk", "is", "long", "and", "its", "strands", "are", "laid", "by", "hand", "when", "winter")


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def prose(draw: random.Random, sentences: int) -> str:
    return " ".join(" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(sentences))


@pytest.fixture
def corpora(tmp_path: Path) -> Path:
    draw = random.Random(0)
    data = tmp_path / "data"
    speeches = [f"{draw.choice(WORDS).upper()}:\n{prose(draw, 2)}" for _ in range(900)]
    (data / "tinyshakespeare").mkdir(parents=True)
    (data / "tinyshakespeare/input.txt").write_text("\n\n".join(speeches))
    books = [{"text": "\n\n".join(prose(draw, 20) for _ in range(20))} for _ in range(6)]
    write_rows(data / "classic-books-en/books-00.jsonl.gz", books)
    poems = [
        {"title": "無題", "text": "，".join("".join(draw.choices(CHINESE, k=5)) for _ in range(4))} for _ in range(400)
    ]
    write_rows(data / "chinese-poetry/poetry.jsonl.gz", poems)
    pages = [{"en": prose(draw, 5), "zh": "".join(draw.choices(CHINESE, k=60))} for _ in range(200)]
    write_rows(data / "libreoffice-help-en-zh/pages.jsonl.gz", pages)
    return data


def walked(corpora: Path, *walks: str) -> dict:
    only = [word for walk in walks for word in ("--only", walk)]
    command = [sys.executable, str(SCRIPT), "--quick", "--data", str(corpora), *only]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["walks"]


@pytest.mark.slow
def test_every_walk_of_the_first_hour_ends_well(corpora: Path) -> None:
    found = walked(corpora)
    assert found.keys() == {"shakespeare", "longer", "books", "poems", "chats", "parallel", "lora"}
    assert all(walk["wrong"] == [] for walk in found.values())
    assert found["parallel"]["documents"] == 400


def test_a_walk_without_its_corpus_is_skipped(tmp_path: Path) -> None:
    assert walked(tmp_path, "poems") == {}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("first_hour", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "first_hour", module)
    spec.loader.exec_module(module)
    return module


def test_filters_and_what_is_held_out_are_judged(script: ModuleType) -> None:
    steps = [("collect", 100, 100), ("filter", 100, 94), ("deduplicate", 94, 80), ("near", 80, 70)]
    sources = [{"steps": [{"step": s, "documents_in": a, "documents_out": b} for s, a, b in steps]}]
    shards = [{"split": "train", "tokens": 990}, {"split": "validation", "tokens": 10}]
    found = script.shares({"sources": sources, "shards": shards}, asked=0.03)
    assert (found["kept"], found["equal"], found["held_out"]) == (0.94, 0.24, 0.01)
    assert len(script.judged(found)) == 2
    assert script.judged(found | {"kept": 0.95, "asked": 0.02}) == []
