"""`evaluate.tasks`: names, patterns, tags, groups, suites and files; results of groups; the ability profile."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import UserError
from ropewalk.base.metric import Metric
from ropewalk.evaluate.config import TASK_FILE, TASKS, Evaluate
from ropewalk.evaluate.harness.ability_profile import ability_profile
from ropewalk.evaluate.harness.named_tasks import NamedTasks, check_named, group_metrics
from ropewalk.evaluate.harness.yaml_task import YamlTask
from tests.evaluate.harness.opened import NoCorpus, no_corpus, written

TASK = """task: {name}
tag: arithmetic
dataset_path: json
dataset_kwargs:
  data_files: {{test: test.jsonl}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
"""
ROWS = [{"question": "1 + 1 =", "answer": "2"}]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "tasks"
    place.mkdir()
    for name in ("sums", "products", "roots"):
        written(place, f"{name}.yaml", TASK.format(name=name), test=ROWS)
    return place


def settings(*names: str, **changed: Any) -> Evaluate:
    return dataclasses.replace(Evaluate(tasks=names, task_folders=("tasks",)), **changed)


def tasks(*names: str, **changed: Any) -> list[YamlTask]:
    held_out = no_corpus(settings(*names, **changed))
    opener = NamedTasks(held_out.settings, held_out)
    return [task for name in names for task in opener.open(name)]


def opened(*names: str, **changed: Any) -> list[str]:
    return [task.name for task in tasks(*names, **changed)]


def test_tasks_are_named_by_name_pattern_tag_and_file() -> None:
    assert opened("sums") == ["sums"]
    assert opened("*s") == ["products", "roots", "sums"]
    assert opened("arithmetic") == ["products", "roots", "sums"]
    assert opened("tasks/roots.yaml", task_folders=()) == ["roots"]


def test_a_task_named_twice_runs_once() -> None:
    assert opened("sums", "arithmetic", "tasks/sums.yaml") == ["sums", "products", "roots"]


def test_two_tasks_of_one_name_are_an_error(folder: Path) -> None:
    written(folder.parent, "other.yaml", TASK.format(name="sums"), test=ROWS)
    with pytest.raises(UserError, match='two tasks have the name "sums"'):
        opened("sums", "other.yaml")


def test_an_unknown_name_comes_with_a_suggestion() -> None:
    with pytest.raises(UserError, match='no task "product"; did you mean "products"'):
        opened("product")
    with pytest.raises(UserError, match='no suite "reading"; there are all, cloze, dialogue'):
        opened("suite:reading")
    with pytest.raises(UserError, match=r'no task matches "none-\*"'):
        opened("none-*")


def test_names_in_the_table_are_tasks_in_python_and_any_other_name_may_be_a_file() -> None:
    assert TASKS["held-out"] is not TASK_FILE
    assert all(TASKS[name] is TASK_FILE for name in ("sums", "suite:reasoning", "tasks/roots.yaml", "*_zh"))


def test_the_suite_of_code_is_the_task_in_python() -> None:
    assert TASKS["suite:code"] == TASKS["humaneval"]
    assert TASKS["suite:code"].load().ability == "code"


def test_a_suite_leaves_out_what_has_no_data_and_says_so() -> None:
    held_out = no_corpus(settings("suite:reasoning"))
    # Metrics of its tasks are looked up when they are scored.
    found = NamedTasks(held_out.settings, held_out).open("suite:reasoning")
    assert [task.name for task in found] == ["logic_en", "logic_zh"]
    assert isinstance(held_out, NoCorpus)
    (line,) = held_out.said
    assert "not measured, as their data are not here: copa, gsm8k, hellaswag, piqa" in line


def test_wrong_tasks_are_found_before_training(folder: Path) -> None:
    written(folder, "bad.yaml", TASK.format(name="bad") + "metric_list: [{metric: beauty}]\n")
    written(folder, "far.yaml", TASK.format(name="far").replace("json", "us/far"))
    found = check_named(settings("sums", "held-out", "bad", "far", "nothing"))
    assert [text.partition(";")[0].split(": ", 1)[1][:40] for text in found] == [
        '`metric_list` : no metric "beauty"',
        "task `far`: the data set us/far is not o",
        'no task "nothing"',
    ]


def test_a_python_class_is_left_to_the_bridge(folder: Path) -> None:
    (folder / "own.yaml").write_text("task: own\nclass: !function own.Task\n")
    with pytest.raises(UserError, match="written as a Python class, which runs in lm-eval only"):
        opened("own")


GROUP = """group: maths
task:
  - sums
  - task: products
    num_fewshot: 0
    doc_to_text: "Q: {{question}}"
  - group: deep
    task: [roots]
    aggregate_metric_list: [{metric: exact_match, weight_by_size: false}]
aggregate_metric_list:
  - {metric: exact_match, weight_by_size: true}
repeats: 2
"""


def test_a_group_opens_its_tasks_with_the_settings_that_it_gives_them(folder: Path) -> None:
    (folder / "maths.yaml").write_text(GROUP)
    found = tasks("maths")
    assert [(task.name, task.repeats, task.questions[0].prompt) for task in found] == [
        ("sums", 2, "1 + 1 ="),
        ("products", 2, "Q: 1 + 1 ="),
        ("roots", 2, "1 + 1 ="),
    ]


def measured(value: float, n: int, half: float) -> list[Metric]:
    return [Metric("exact_match", value, (value - half, value + half), n=n, unit="share")]


def test_a_group_has_the_mean_of_its_tasks_by_items_or_by_task(folder: Path) -> None:
    (folder / "maths.yaml").write_text(GROUP)
    results = {"sums": measured(0.5, 100, 0.1), "products": measured(0.8, 300, 0.2), "roots": measured(0.2, 0, 0.3)}
    found = group_metrics(tasks("maths"), results)
    (metric,) = found["maths"]
    assert (metric.value, metric.n) == (pytest.approx((0.5 * 100 + 0.8 * 300) / 400), 400)
    # Independent tasks: variances add, with squared weights.
    half = ((0.25 * 0.1) ** 2 + (0.75 * 0.2) ** 2) ** 0.5
    assert metric.interval == pytest.approx((metric.value - half, metric.value + half))
    assert [each.value for each in found["deep"]] == [0.2]
    (folder / "maths.yaml").write_text(GROUP.replace("weight_by_size: true", "weight_by_size: false"))
    assert group_metrics(tasks("maths"), results)["maths"][0].value == pytest.approx(0.5)


def test_a_group_that_contains_itself_is_an_error(folder: Path) -> None:
    (folder / "maths.yaml").write_text("group: maths\ntask: [sums, maths]\n")
    with pytest.raises(UserError, match=r"maths\.yaml:1: `group` contains itself"):
        opened("maths")


def with_ability(folder: Path, **abilities: str) -> list[YamlTask]:
    for name, metadata in abilities.items():
        text = TASK.format(name=name) + f"metadata: {metadata}\n"
        written(folder, f"{name}.yaml", text, test=ROWS)
    return tasks(*abilities)


def test_the_profile_puts_chance_at_0_and_perfection_at_1(folder: Path) -> None:
    found = with_ability(folder, sums="{ability: maths}", products="{ability: maths}", roots="{ability: words}")
    results = {
        "sums": [Metric("acc", 0.625, (0.5, 0.75), n=8, unit="share", references={"chance": 0.25})],
        "products": [Metric("exact_match", 0.1, (0.0, 0.2), n=10, unit="share")],
        "roots": [Metric("bleu", 30.0, (20.0, 40.0), n=5)],
    }
    profile = ability_profile(found, results)
    assert list(profile) == ["maths", "words"]
    assert profile["maths"]["value"] == pytest.approx((0.5 + 0.1) / 2)
    assert profile["maths"]["n"] == 18
    assert profile["maths"]["tasks"] == ["sums", "products"]
    half = ((0.5 * (0.125 / 0.75)) ** 2 + (0.5 * 0.1) ** 2) ** 0.5
    assert profile["maths"]["interval"] == pytest.approx([0.3 - half, 0.3 + half])
    assert profile["words"]["value"] == pytest.approx(0.3)


def test_the_profile_prefers_public_data_and_leaves_out_what_has_no_best_value(folder: Path) -> None:
    found = with_ability(
        folder, sums="{ability: maths, ours: true}", products="{ability: maths}", roots="{ability: words}"
    )
    results = {
        "sums": [Metric("acc", 1.0, n=10, unit="share")],
        "products": [Metric("acc", 0.4, n=500, unit="share")],
        "roots": [Metric("perplexity", 30.0, n=5, better="lower")],
    }
    profile = ability_profile(found, results)
    assert profile == {"maths": {"value": 0.4, "interval": None, "n": 500, "tasks": ["products"], "ours": False}}
    assert ability_profile(found[:1], results)["maths"]["ours"] is True


def test_the_recipe_says_how_many_examples_are_shown_and_which_folders_are_trusted(folder: Path) -> None:
    shown, question = {"question": "2 + 2 =", "answer": "4"}, "1 + 1 ="
    text = TASK.format(name="shows") + "fewshot_split: train\n"
    written(folder, "shows.yaml", text.replace("test.jsonl}", "test.jsonl, train: train.jsonl}"), train=[shown])
    assert [tasks("shows", fewshot=shots)[0].questions[0].preamble for shots in (-1, 1)] == ["", "2 + 2 = 4\n\n"]
    written(folder, "shouts.yaml", TASK.format(name="shouts") + "process_docs: !function shout.shouted\n")
    (folder / "shout.py").write_text("def shouted(rows):\n    return [{**row, 'question': '!'} for row in rows]\n")
    assert tasks("shouts", trusted_folders=(str(folder),))[0].questions[0].prompt == "!" != question
    with pytest.raises(UserError, match="trusted_folders"):
        _ = tasks("shouts")[0].questions


def test_a_chat_template_is_needed_to_use_one() -> None:
    with pytest.raises(UserError, match="the model has no chat template"):
        opened("sums", chat_template="multi-turn")


def test_a_file_of_data_sets_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match=r"`evaluate\.datasets`: no file gone\.toml"):
        opened("sums", datasets="gone.toml")
