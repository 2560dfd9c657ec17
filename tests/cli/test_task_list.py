"""`ropewalk evaluate tasks` and `ropewalk evaluate datasets`."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.conftest import Call
from tests.evaluate.harness.opened import FOLDER

LISTED = "import resource, sys\nfrom ropewalk.cli.main import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
LISTED += (
    "    used = resource.getrusage(resource.RUSAGE_SELF)\n    print(used.ru_utime + used.ru_stime, file=sys.stderr)\n"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_tasks_are_listed_with_kind_metrics_and_data(call: Call) -> None:
    ended = call("evaluate", "tasks", "qa_")
    assert ended.status == 0
    header, *lines = ended.out.splitlines()
    assert header.split() == ["task", "kind", "ability", "metrics", "data"]
    assert [line.split()[0] for line in lines] == ["qa_en", "qa_zh"]
    assert lines[0].endswith("ready, ten items of our own")


def test_the_list_is_filtered_and_speaks_json(call: Call, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("task: [\n")
    (tmp_path / "own.yaml").write_text("task: own_list\ndataset_path: us/own\ntest_split: test\n")
    listed = json.loads(call("evaluate", "tasks", "own_*", "--folder", str(tmp_path), "--json").out)
    (task,) = listed["tasks"]
    assert (task["name"], task["data"], task["data_set"], task["ours"]) == ("own_list", "missing", "us/own", False)
    assert list(listed["broken"]) == [str(tmp_path / "bad.yaml")]


def test_tasks_in_python_say_what_they_measure_and_suites_are_named(call: Call) -> None:
    lines = call("evaluate", "tasks").out.splitlines()
    assert next(line for line in lines if line.startswith("winobias ")).endswith("less that against it.")
    assert lines[-1].startswith("suites: suite:all, ")
    assert call("evaluate", "tasks", "reasoning").out.splitlines()[-1] == "suites: suite:reasoning"


def test_a_pattern_that_matches_nothing_is_an_error(call: Call) -> None:
    ended = call("evaluate", "tasks", "nothing-like-it")
    assert (ended.status, ended.err) == (2, 'no task matches "nothing-like-it"; `ropewalk evaluate tasks` lists all\n')


def test_entries_for_missing_data_are_toml_with_the_command_that_fetches_them(call: Call) -> None:
    ended = call("evaluate", "datasets", "arc_easy")
    assert ended.out.startswith("# hf download allenai/ai2_arc --repo-type dataset ")
    assert tomllib.loads(ended.out) == {"allenai/ai2_arc:ARC-Easy": {"test": "data/ai2_arc/ARC-Easy/test*.parquet"}}
    assert call("evaluate", "datasets", "logic_en").out == "# all data sets of these tasks are here\n"


def test_a_recipe_brings_its_folders_and_data_sets(call: Call, tiny: Path) -> None:
    recipe = (tiny / "tiny.toml").read_text()
    added = f'[evaluate]\ntask_folders = ["{FOLDER}"]\ndatasets = "here.toml"\n'
    (tiny / "tiny.toml").write_text(recipe.replace("[evaluate]\n", added))
    (tiny / "here.toml").write_text('["google/boolq"]\nvalidation = "boolq.jsonl"\n')
    (tiny / "boolq.jsonl").write_text('{"question": "is it"}\n')
    found = json.loads(call("evaluate", "tasks", "bool*", "--recipe", "tiny.toml", "--json").out)
    assert [(task["name"], task["data"]) for task in found["tasks"]] == [("boolq", "ready")]
    assert "cloze" in call("evaluate", "tasks", "cloze", "--recipe", "tiny.toml").out


def test_thousands_of_tasks_are_listed_quickly(tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / f"task_{number}.yaml").write_text(f"task: many_{number}\ndataset_path: us/many\ntest_split: test\n")
    command = [sys.executable, "-c", LISTED, "evaluate", "tasks", "many_1*", "--folder", str(tmp_path)]
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": ""}
    done = [subprocess.run(command, env=environment, capture_output=True, text=True) for _ in range(3)]
    assert [len(each.stdout.splitlines()) for each in done] == [1112] * 3, done[0].stderr
    # We promise 0.2 s; twice that is what a busy machine may take. Without the index it takes 0.6 s.
    assert min(float(each.stderr) for each in done[1:]) < 0.4
