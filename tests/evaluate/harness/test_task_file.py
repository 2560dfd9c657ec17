"""Task files: includes, lines, warnings, contradictions, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError, MissingPackage, UserError
from ropewalk.evaluate.harness import template
from ropewalk.evaluate.harness.task_file import check_task, read_task_file
from tests.evaluate.harness.opened import opened, written

TASK = """task: small
dataset_path: json
dataset_kwargs:
  data_files: {test: test.jsonl}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
"""
ROWS = [{"question": "1 + 1 =", "answer": "2"}, {"question": "2 + 2 =", "answer": "4"}]


def task_with(folder: Path, text: str) -> Path:
    return written(folder, "small.yaml", TASK + text, test=ROWS)


def test_included_files_are_merged_and_the_including_one_wins(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "base").write_text("num_fewshot: 3\nrepeats: 2\ninclude: ../root.yml\n")
    (tmp_path / "root.yml").write_text("repeats: 9\ndescription: root\n")
    file = read_task_file(task_with(tmp_path, "include: [deep/base, root.yml]\nnum_fewshot: 1\n"))
    # Of two included files the later one wins, as in lm-eval.
    assert (file.get("num_fewshot"), file.get("repeats"), file.get("description")) == (1, 9, "root")
    assert [path.name for path in file.files] == ["small.yaml", "base", "root.yml"]
    assert file.where("description").endswith("root.yml:2")


def test_files_that_include_each_other_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("include: small.yaml\n")
    with pytest.raises(DataError, match=r"round in a circle: small\.yaml -> other\.yaml -> small\.yaml"):
        read_task_file(task_with(tmp_path, "include: other.yaml\n"))


def test_an_unknown_key_is_a_warning_with_file_line_and_suggestion(tmp_path: Path) -> None:
    path = task_with(tmp_path, "num_fewshots: 3\n")
    assert check_task(read_task_file(path)) == [
        f"{path}:8: unknown key `num_fewshots` is ignored; did you mean `num_fewshot`?"
    ]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("output_type: generate\n", 8, '`output_type` is "generate"; it must be one of loglikelihood'),
        ("output_type: multiple_choice\n", 8, "there is no `doc_to_choice`"),
        ("num_fewshot: -1\n", 8, "`num_fewshot` is -1; it must be a whole number of at least 0"),
        ("repeats: many\n", 8, "`repeats` is 'many'"),
        ("fewshot_config: {sampler: balanced}\n", 8, '`fewshot_config` has sampler "balanced"'),
        ("metric_list: exact_match\n", 8, "`metric_list` must be a list"),
        ("task: another\n", 8, "`task` stands on line 1 already, with another value"),
        ("doc_to_image: picture\n", 8, "`doc_to_image` is not supported: no model here reads images"),
        ("description: [1,\n", 9, "node content"),
    ],
)
def test_a_contradiction_is_an_error_with_file_and_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = task_with(tmp_path, text)
    with pytest.raises(DataError) as error:
        check_task(read_task_file(path))
    assert str(error.value).startswith(f"{path}:{line}: ")
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("output_type: loglikelihood\ngeneration_kwargs: {until: []}\n", "`generation_kwargs` has no effect"),
        ("generation_kwargs: {do_sample: false, temperature: 0.5}\n", "`temperature` has no effect"),
        ("fewshot_split: test\nfewshot_config: {samples: [{question: a}]}\n", "the split counts"),
    ],
)
def test_a_setting_without_effect_is_a_warning(tmp_path: Path, text: str, what: str) -> None:
    (warning,) = check_task(read_task_file(task_with(tmp_path, text)))
    assert what in warning


def test_python_tags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not determine a constructor"):
        read_task_file(task_with(tmp_path, "description: !!python/object/apply:os.getcwd []\n"))


def test_a_function_runs_only_if_its_folder_is_trusted(tmp_path: Path) -> None:
    path = task_with(tmp_path, "process_docs: !function own.halved\n")
    (tmp_path / "own.py").write_text("def halved(rows):\n    return rows.select(range(len(rows) // 2))\n")
    with pytest.raises(UserError, match=r"small\.yaml:8: .*own\.py; .*evaluate\.trusted_folders"):
        _ = opened(path).questions
    assert [question.prompt for question in opened(path, trusted=[tmp_path]).questions] == ["1 + 1 ="]


def test_a_function_cannot_leave_the_trusted_folder(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "own.py").write_text("def f(rows):\n    return rows\n")
    (inner / "own.py").symlink_to(tmp_path / "own.py")
    path = task_with(inner, "process_docs: !function own.f\n")
    with pytest.raises(UserError, match=r"evaluate\.trusted_folders"):
        _ = opened(path, trusted=[inner]).questions


def test_a_template_reads_fields_and_nothing_else(tmp_path: Path) -> None:
    text = TASK.replace("{{question}}", "{{question.__class__.__mro__}}")
    with pytest.raises(DataError, match=r"small\.yaml:6: .*unsafe"):
        _ = opened(written(tmp_path, "small.yaml", text, test=ROWS)).questions


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    text = TASK.replace("{{question}}", "{{quest}}")
    with pytest.raises(DataError, match=r"small\.yaml:6: 'quest' is undefined; a document has the fields question, an"):
        _ = opened(written(tmp_path, "small.yaml", text, test=ROWS)).questions


@pytest.mark.parametrize("package", ["yaml", "jinja2"])
def test_a_missing_package_comes_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    path = task_with(tmp_path, "")
    template._environment.cache_clear()
    template._compiled.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=r"a task written as YAML needs the package .*\[evaluate\]"):
        _ = opened(path).questions
