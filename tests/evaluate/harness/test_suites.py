"""The suites that come with ropewalk: every task can be opened, and our own items are sound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk.evaluate.harness.metric_entries import DEFAULTS
from ropewalk.evaluate.harness.task_file import check_task, read_task_file
from ropewalk.evaluate.harness.task_index import SUITES
from tests.evaluate.harness.opened import opened

FILES = sorted(SUITES.glob("*/*.yaml"))
OWN = [path for path in FILES if read_task_file(path).get("metadata").get("ours")]
ABILITIES = {
    *("logical reasoning", "translation", "natural language inference", "question answering", "dialogue", "grammar"),
    *("knowledge memorised", "knowledge understood", "knowledge applied", "knowledge created", "word prediction"),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_task_is_named_as_its_file_and_nothing_in_it_is_odd(path: Path) -> None:
    file = read_task_file(path)
    assert file.get("task") == path.stem
    assert check_task(file) == []
    assert file.get("metadata")["ability"] in ABILITIES


def test_every_ability_has_items_of_our_own_or_a_public_set() -> None:
    assert {read_task_file(path).get("metadata")["ability"] for path in FILES} == ABILITIES


def test_the_abilities_come_in_both_languages() -> None:
    chinese = [read_task_file(path).get("metadata") for path in OWN if "zh" in path.stem]
    assert {metadata["ability"] for metadata in chinese} >= {
        *(
            "logical reasoning",
            "translation",
            "natural language inference",
            "question answering",
            "dialogue",
            "grammar",
        ),
        "knowledge memorised",
    }


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_our_own_tasks_have_ten_different_items_with_an_answer(path: Path) -> None:
    task = opened(path)
    assert len({question.key for question in task.questions}) == 10
    for question in task.questions:
        assert all(text.strip() for text in question.references)
        assert len({*question.choices}) == len(question.choices)
        assert question.references
    if task.ask == "multiple_choice" and task.ability != "grammar":
        golds = [question.gold[0] for question in task.questions]
        choices = len(task.questions[0].choices)
        # Always naming the same choice gives no more than four of ten.
        assert max(golds.count(choice) for choice in range(choices)) <= 4


def test_items_of_the_levels_of_kola_name_their_level() -> None:
    levels = {
        path.stem: read_task_file(path).get("metadata").get("level") for path in OWN if path.parent.name == "knowledge"
    }
    assert {*levels.values()} == {"KM", "KU", "KA", "KC"}


def test_every_data_file_belongs_to_a_task() -> None:
    used = {
        path.parent / name for path in OWN for name in read_task_file(path).get("dataset_kwargs")["data_files"].values()
    }
    assert used == {*SUITES.glob("*/*.jsonl")}


def test_data_files_are_json_lines_in_utf_8() -> None:
    for path in SUITES.glob("*/*.jsonl"):
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert len(rows) == 10, path


def test_every_output_type_has_default_metrics() -> None:
    assert {read_task_file(path).get("output_type") for path in FILES} <= {*DEFAULTS}
