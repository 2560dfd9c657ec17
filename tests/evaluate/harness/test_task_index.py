"""The index of task files: cached by time and size, and found out of date by either."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.evaluate.harness.task_index import TaskIndex


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "tasks"
    (place / "inner").mkdir(parents=True)
    (place / "inner" / "_base").write_text("output_type: multiple_choice\ndataset_path: us/facts\n")
    (place / "inner" / "facts.yaml").write_text("include: _base\ntask: facts\ntag: [known]\nmetadata: {ability: QA}\n")
    (place / "all.yaml").write_text("group: all_facts\ntask: [facts]\n")
    (place / "code.yaml").write_text("task: code\nclass: !function task.Code\n")
    return place


def index(folder: Path) -> TaskIndex:
    return TaskIndex([folder], cache=folder.parent / "cache")


def test_tasks_groups_and_python_classes_are_listed(folder: Path) -> None:
    found = index(folder)
    assert {name: found[name].kind for name in found.names} == {"all_facts": "group", "code": "python", "facts": "task"}
    entry = found["facts"]
    assert (entry.output_type, entry.data_set, entry.tags, entry.ability) == (
        "multiple_choice",
        "us/facts",
        ("known",),
        "QA",
    )
    assert [entry.name for entry in found.tagged("known")] == ["facts"]


def test_a_pattern_matches_names_and_abilities(folder: Path) -> None:
    found = index(folder)
    assert [[entry.name for entry in found.matching(text)] for text in ("fact", "*s", "QA", "inner/*", "none")] == [
        ["all_facts", "facts"],
        ["all_facts", "facts"],
        ["facts"],
        [],
        [],
    ]


def test_a_file_that_has_not_changed_is_not_read_again(folder: Path) -> None:
    assert "facts" in index(folder)
    file = folder / "inner" / "facts.yaml"
    status = file.stat()
    file.write_text(file.read_text().replace("task: facts", "task: fakes"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "facts" in index(folder)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert "fakes" in index(folder)


def test_a_change_of_an_included_file_is_seen(folder: Path) -> None:
    assert index(folder)["facts"].data_set == "us/facts"
    (folder / "inner" / "_base").write_text("output_type: multiple_choice\ndataset_path: us/other_facts\n")
    assert index(folder)["facts"].data_set == "us/other_facts"


def test_new_and_removed_files_are_seen(folder: Path) -> None:
    assert len(index(folder)) == 3
    (folder / "code.yaml").unlink()
    (folder / "new.yml").write_text("task: new\n")
    assert index(folder).names == ["all_facts", "facts", "new"]


def test_a_damaged_cache_is_made_again(folder: Path) -> None:
    names = index(folder).names
    for file in (folder.parent / "cache").iterdir():
        file.write_text("{")
    assert index(folder).names == names


def test_the_first_folder_that_has_a_name_counts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "facts.yaml").write_text("task: facts\ndataset_path: us/mine\n")
    found = TaskIndex([tmp_path / "mine", folder], cache=tmp_path / "cache")
    assert found["facts"].data_set == "us/mine"


def test_a_file_that_cannot_be_read_is_listed_as_broken(folder: Path) -> None:
    (folder / "bad.yaml").write_text("task: [\n")
    found = index(folder)
    assert [Path(path).name for path in found.broken] == ["bad.yaml"]
    assert found.broken == index(folder).broken
    assert "facts" in found


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone: no such folder of task files; see `evaluate\.task_folders`"):
        TaskIndex([tmp_path / "gone"])
