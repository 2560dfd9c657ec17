"""A rule that removes much of a source is told, with the command that tries another threshold."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path

import pytest
from random_prose import prose

from ropewalk.base.progress import Silent
from ropewalk.prepare.config import C4, Deduplicate, Filter, Gopher, Language, Near, Prepare, Source, WordList
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.severe import RECIPE, addressed

TEXTS = [prose(number, 10 if number % 2 else 60) for number in range(40)]


class Listener(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def told(settings: Prepare, texts: list[str], **changes: object) -> list[str]:
    Path("some.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    source = Source(name="some", paths=("some.jsonl",))
    made = prepare(dataclasses.replace(settings, sources=(source,), **changes), seed=1)
    return [line for line in made.manifest.warnings if line.startswith('source "some"')]


def change_in(line: str) -> str:
    """The last word of the command in the line."""
    words = shlex.split(line.split("`")[1])
    assert words[:4] == ["ropewalk", "prepare", "what-if", RECIPE]
    return words[4]


def test_a_rule_is_told_with_what_it_met_and_a_threshold_that_would_keep_most(settings: Prepare) -> None:
    lines = told(settings, TEXTS, filter=Filter(min_characters=150))
    (line,) = [line for line in lines if "rule" in line]
    short = sorted(len(text) for text in TEXTS if len(text) < 150)
    assert line.startswith('source "some": rule min_characters removed 20 of 40 documents and 1')
    assert "where it asks for at least 150" in line
    name, value = change_in(line).split("=")
    assert name == "filter.min_characters"
    kept = sum(length >= int(value) for length in short)
    assert 0.9 <= kept / len(short) <= 1
    assert short[0] <= int(value) <= short[-1]


@pytest.mark.parametrize(
    ("rules", "change"),
    [
        (Filter(gopher=Gopher(min_words=50, min_stop_words=0)), "filter.gopher.min_words=10"),
        (Filter(c4=C4(terminal_punctuation=False, min_sentences=0)), "filter.c4.curly_brackets=false"),
        (Filter(language=Language(keep=("zh",), min_confidence=0)), "filter.language.keep=[]"),
        (Filter(min_letter_share=0.995), "filter.min_letter_share=0.9"),
    ],
)
def test_each_kind_of_rule_has_a_change_that_keeps_more(settings: Prepare, rules: Filter, change: str) -> None:
    texts = [*(f"{text}{{" for text in TEXTS), *(f"绳索是用麻做的，很长。{prose(number, 3)}" for number in range(4))]
    (line,) = [line for line in told(settings, texts, filter=rules) if " rule " in line]
    assert change_in(line).startswith(change.rstrip("0123456789."))


def test_a_rule_that_removes_a_third_or_less_is_not_told(settings: Prepare) -> None:
    texts = [prose(number, 60) for number in range(20)] + [prose(number, 10) for number in range(20, 30)]
    assert not any(" rule " in line for line in told(settings, texts, filter=Filter(min_characters=150)))
    texts = [*texts, prose(31, 10)]
    assert any(" rule " in line for line in told(settings, texts, filter=Filter(min_characters=150)))


def test_bytes_count_as_documents_do(settings: Prepare) -> None:
    texts = [*(prose(number, 60) for number in range(20)), prose(20, 3000)]
    (line,) = [line for line in told(settings, texts, filter=Filter(max_characters=5000)) if " rule " in line]
    assert "removed 1 of 21 documents and 7" in line
    assert "at most 5,000" in line


def test_duplicates_are_told_apart_from_rules(settings: Prepare) -> None:
    texts = [prose(number, 60) for number in range(10)] * 2
    near_off = Deduplicate(near=Near(kind="off"))
    (line,) = [line for line in told(settings, texts, deduplicate=near_off) if "removed" in line]
    assert line.startswith(
        'source "some": 10 of 20 documents and 50% of the bytes were removed as equal to earlier ones'
    )


def test_a_list_of_words_has_its_threshold(settings: Prepare) -> None:
    Path("words.txt").write_text("rope\nhemp\n")
    rules = Filter(words=WordList(files=("words.txt",)))
    (line,) = [line for line in told(settings, TEXTS, filter=rules) if " rule " in line]
    assert change_in(line).startswith("filter.words.max_words=")


def test_the_recipe_is_named_where_it_is_known(settings: Prepare) -> None:
    listener = Listener()
    Path("some.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    made = dataclasses.replace(
        settings, sources=(Source(name="some", paths=("some.jsonl",)),), filter=Filter(min_characters=150)
    )
    found = prepare(made, seed=1, progress=listener, recipe="'my recipe.toml' seed=2")
    (line,) = [line for line in found.manifest.warnings if " rule " in line]
    assert f"what-if {RECIPE} filter" in line
    assert addressed(line, "'my recipe.toml' seed=2") in listener.lines
    assert "what-if 'my recipe.toml' seed=2 filter" in addressed(line, "'my recipe.toml' seed=2")
    assert addressed(line, "") == line
