"""Tasks written as YAML in a whole evaluation: a model answers, results and the profile are written."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from ropewalk.base.metric import read_tasks
from ropewalk.config.read import parse
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.evaluation import evaluate, write_evaluation
from ropewalk.evaluate.harness.named_tasks import named_digests
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.metrics import self_contrast
from ropewalk.evaluate.results import read_results
from ropewalk.flow.preflight import check_inputs
from ropewalk.flow.recipe import Recipe
from ropewalk.model.decoder import build
from ropewalk.prepare.chat import jinja
from ropewalk.store.manifest import read_manifest

from .harness.opened import written
from .tiny import planned, small

TASK = """task: letters
dataset_path: json
dataset_kwargs:
  data_files: {test: test.jsonl}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metadata: {version: 3, ability: spelling}
"""
ROWS = [{"question": f"{letter} comes after ", "answer": letter.lower()} for letter in "BCDE"]
GROUP = "group: school\ntask: [letters]\naggregate_metric_list: [{metric: exact_match}]\n"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    written(tmp_path / "tasks", "letters.yaml", TASK, test=ROWS)
    (tmp_path / "tasks" / "school.yaml").write_text(GROUP)
    return Evaluate(tasks=("school", "held-out"), task_folders=(str(tmp_path / "tasks"),))


def test_a_model_answers_and_results_have_tasks_groups_and_profile(
    corpus: Path, settings: Evaluate, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    spec = small(vocabulary=read_manifest(corpus).tokenizer.vocabulary, sequence_length=32)
    held_out = HeldOut(corpus, settings, seed=0)
    found = evaluate(planned(build(spec, seed=0), held_out), held_out)
    write_evaluation(tmp_path, found, step=1)
    results = read_results(tmp_path)
    assert list(results["tasks"]) == ["letters", "held-out", "school"]
    (metric,) = read_tasks(results)["letters"]
    assert (metric.name, metric.n, metric.interval is not None) == ("exact_match", 4, True)
    assert "task:letters|version:3|shots:0|data:" in metric.signature
    assert results["tasks"]["school"]["exact_match"]["value"] == metric.value
    profile = results["profile"]["spelling"]
    assert (profile["value"], profile["n"], profile["tasks"]) == (metric.value, 4, ["letters"])


def test_results_are_measured_again_when_a_task_or_its_data_change(settings: Evaluate, tmp_path: Path) -> None:
    before = named_digests(settings)
    assert before == named_digests(settings)
    written(tmp_path / "tasks", "letters.yaml", TASK, test=[*ROWS, {"question": "?", "answer": "!"}])
    other_data = named_digests(settings)
    written(tmp_path / "tasks", "letters.yaml", TASK.replace("max_gen_toks: 4", "max_gen_toks: 5"))
    other_task = named_digests(settings)
    assert len({each["letters"] for each in (before, other_data, other_task)}) == 3
    assert named_digests(dataclasses.replace(settings, tasks=("held-out",))) == {}


def test_a_recipe_is_checked_for_tasks_that_are_not_there(settings: Evaluate, tmp_path: Path) -> None:
    from ropewalk.base.errors import ConfigError

    (tmp_path / "text.txt").write_text("some text\n")
    text = f"""name = "checked"
[[prepare.sources]]
name = "text"
paths = ["{tmp_path}/text.txt"]
[evaluate]
task_folders = ["{tmp_path}/tasks"]
tasks = ["letters", "leters", "held-out"]
"""
    with pytest.raises(ConfigError) as error:
        check_inputs(parse(Recipe, text, "checked.toml"))
    (problem,) = error.value.problems
    assert str(problem) == 'checked.toml:7: evaluate.tasks: no task "leters"; did you mean "letters"?'
    check_inputs(parse(Recipe, text.replace('"leters", ', ""), "checked.toml"))


def test_what_tasks_lack_is_named_before_training(
    settings: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ropewalk.base.errors import ConfigError

    (tmp_path / "text.txt").write_text("some text\n")
    text = f"""name = "checked"
[[prepare.sources]]
name = "text"
paths = ["{tmp_path}/text.txt"]
[evaluate]
task_folders = ["{tmp_path}/tasks"]
tasks = ["held-out", "winobias", "knowledge-creation"]
during.tasks = ["absent"]
"""

    def problems(text: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            check_inputs(parse(Recipe, text, "checked.toml"))
        return list(map(str, error.value.problems))

    (bias,) = problems(text)
    assert bias.startswith("checked.toml:7: task `winobias` reads")
    assert problems(text + "during.every_steps = 5\n")[1].startswith('checked.toml:8: evaluate.tasks: no task "absent"')
    self_contrast._scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    assert "needs the package `rouge-score`" in problems(text)[1]


def test_a_corpus_with_dialogues_gives_the_chat_template_of_its_model(corpus: Path) -> None:
    assert HeldOut(corpus, Evaluate(), seed=0).chat_template == ""
    held_out = HeldOut(corpus, Evaluate(), seed=0)
    entry = dataclasses.replace(read_manifest(corpus).tokenizer, chat="plain")
    held_out._manifest = dataclasses.replace(read_manifest(corpus), tokenizer=entry)
    assert held_out.chat_template == jinja("plain")
