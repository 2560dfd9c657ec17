"""Filters give what those of lm-evaluation-harness 0.4.13 give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.evaluate.harness.doc_fields import DocFields
from ropewalk.evaluate.harness.filters import pipelines
from ropewalk.evaluate.harness.task_file import TaskFile

COMPLETIONS = [
    "The answer is (B).",
    "answer: C",
    "I think it's Paris, the capital.",
    "#### 1,234.5",
    "no idea",
    "It is x=12 and y=34",
    "  Padded  ",
]
DOCUMENT = {"choices": ["Lyon", "Paris", "Paris, Texas", "Nice"]}
NONE = "[invalid]"
LAST_NUMBER = {"regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)", "group_select": -1}
LETTER = {"regex_pattern": r"(\([A-Z]\))"}
PLAIN = {"ignore_case": True, "ignore_punctuation": True, "regexes_to_ignore": ["capital"]}
# Printed by lm-eval 0.4.13 for these completions and settings.
RECORDED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("regex", {}, [NONE, NONE, NONE, "1,234.5", NONE, NONE, NONE]),
    ("regex", LAST_NUMBER, [NONE, NONE, NONE, "1,234.5", NONE, "34", NONE]),
    ("regex", {"regex_pattern": r"\((\w)\)", "fallback": "none"}, ["B", *["none"] * 6]),
    ("regex", {"regex_pattern": r"[a-z]=(\d+)"}, [*[NONE] * 5, "12", NONE]),
    ("multi_choice_regex", LETTER, ["(B)", "(C)", "(B)", *[NONE] * 4]),
    ("multi_choice_regex", {**LETTER, **PLAIN}, ["(B)", "(C)", "(B)", *[NONE] * 4]),
    ("remove_whitespace", {}, [*COMPLETIONS[:-1], "Padded"]),
    ("lowercase", {}, [text.lower() for text in COMPLETIONS]),
    ("uppercase", {}, [text.upper() for text in COMPLETIONS]),
    ("map", {"mapping_dict": {"no idea": "?"}, "default_value": "other"}, [*["other"] * 4, "?", "other", "other"]),
    ("take_first", {}, COMPLETIONS[:1]),
    ("take_first_k", {"k": 2}, COMPLETIONS[:2]),
]


def file_with(*entries: Any, trusted: Path | None = None) -> tuple[TaskFile, DocFields]:
    file = TaskFile(Path("task.yaml"), {"filter_list": list(entries)}, {"filter_list": (Path("task.yaml"), 7)})
    return file, DocFields(file, trusted=[trusted] if trusted else [])


def applied(completions: list[str], *filters: dict[str, Any], trusted: Path | None = None) -> list[str]:
    (pipeline,) = pipelines(*file_with({"name": "found", "filter": list(filters)}, trusted=trusted))
    return list(pipeline.apply(completions, DOCUMENT))


@pytest.mark.parametrize(("name", "settings", "recorded"), RECORDED)
def test_a_filter_gives_what_lm_eval_gives(name: str, settings: dict[str, Any], recorded: list[str]) -> None:
    assert applied(COMPLETIONS, {"function": name, **settings}) == recorded


def test_the_majority_wins_and_of_equals_the_first() -> None:
    vote = {"function": "majority_vote"}
    assert applied(["a", "b", "b", "a", "b"], vote) == ["b"]
    assert applied(["a", "b", "b", "a"], vote) == ["a"]


def test_filters_are_applied_in_order() -> None:
    number = {"function": "regex", "regex_pattern": r"(\d+)"}
    found = applied(["is 7", "is 8", "is 8"], number, {"function": "majority_vote"}, {"function": "take_first"})
    assert found == ["8"]


def test_a_completion_without_the_wanted_match_gives_the_fallback() -> None:
    assert applied(["1 2"], {"function": "regex", "regex_pattern": r"(\d)", "group_select": 5}) == [NONE]


def test_without_a_filter_list_the_first_completion_counts() -> None:
    file = TaskFile(Path("task.yaml"), {})
    (pipeline,) = pipelines(file, DocFields(file, trusted=[]))
    assert (pipeline.name, pipeline.apply(["one", "two"], {})) == ("none", ("one",))


def test_a_custom_filter_runs_from_a_trusted_folder_only(tmp_path: Path) -> None:
    from ropewalk.evaluate.harness.task_file import FunctionName

    (tmp_path / "own.py").write_text(
        "def first_words(texts, documents):\n    return [[each.split()[0] for each in own] for own in texts]\n"
    )
    entry = {"function": "custom", "filter_fn": FunctionName("own.first_words", tmp_path)}
    assert applied(["The answer", "answer: C"], entry, trusted=tmp_path) == ["The", "answer:"]
    with pytest.raises(UserError, match=r"evaluate\.trusted_folders"):
        applied(["The answer"], entry)


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"function": "rgex"}, 'no filter "rgex"; known: regex'),
        ({"function": "regex", "pattern": "x"}, "gives regex settings that it does not take"),
        ({"function": "regex", "regex_pattern": "("}, "a regular expression that is none"),
    ],
)
def test_a_wrong_filter_is_named_with_file_and_line(entry: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError, match=rf"^task\.yaml:7: .*{what}"):
        applied(COMPLETIONS, entry)
