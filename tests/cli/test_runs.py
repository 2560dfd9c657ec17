"""A run in the place of a recipe: its settings, its data, nothing refused for settings that a verb does not use."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from ropewalk.base.events import read_events
from ropewalk.flow import profile_step as profiling
from ropewalk.flow.cluster_doctor import cluster_check
from ropewalk.flow.data_doctor import data_probe as examination

from .conftest import Call

RUN = "runs/tiny"


@pytest.fixture
def alone(trained: Path) -> Path:
    """The finished run and its prepared data; recipe and raw files are gone."""
    (trained / "tiny.toml").unlink()
    shutil.rmtree(trained / "corpus")
    return trained


def values(call: Call, *arguments: str) -> dict:
    ended = call(*arguments, "--json")
    assert ended.status == 0, ended.err
    return json.loads(ended.out)


def config(run: Path) -> dict:
    return tomllib.loads((run / "config.toml").read_text())


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", RUN],
        ["prepare", RUN],
        ["prepare", "explain", RUN, "code:corpus/3.py"],
        ["prepare", "what-if", RUN, "filter.min_characters=300"],
        ["prepare", "report", RUN],
        ["plan", RUN],
        ["plan", "draw", RUN, "--ranks", "2"],
        ["model", "describe", RUN],
        ["train", RUN],
        ["train", RUN, "--dry-run"],
        ["evaluate", RUN],
        ["evaluate", f"{RUN}/config.toml"],
        ["doctor", "data", RUN, "--tokens-per-s", "1000"],
        ["recipe", "check", RUN],
        ["recipe", "show", RUN],
        ["recipe", "diff", RUN, RUN],
    ],
    ids=" ".join,
)
def test_a_run_is_taken_where_a_recipe_is(
    arguments: list[str], alone: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "PROBE_SECONDS", 0.02)
    checkpoints = sorted((alone / RUN / "checkpoints").rglob("*"))
    ended = call(*arguments)
    assert ended.status == 0, ended.err
    assert sorted((alone / RUN / "checkpoints").rglob("*")) == checkpoints
    assert config(alone / RUN)["name"] == "tiny"


def test_doctor_cluster_and_profile_take_a_run(alone: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cluster_check, "_on_this_machine", lambda brief, run, _: seen.append(run) or ({}, {}))
    monkeypatch.setattr(cluster_check, "_result", lambda *_, **__: {"stuck": False, "ok": True})
    assert call("doctor", "cluster", RUN).status == 0
    assert seen == [Path(RUN)]

    class Measured(Exception):
        pass

    class Stepping:
        @staticmethod
        def measure_phase(planned: object, *_: object, **__: object) -> None:
            seen.append(planned.spec.vocabulary)
            raise Measured

    monkeypatch.setattr(profiling, "needs_torch", lambda *_: Stepping)
    with pytest.raises(Measured):
        call("profile", RUN)
    # 300 tokens were asked for, and the run has as many as were found.
    assert seen[1] == json.loads((alone / RUN / "stages/prepare.json").read_text())["result"]["vocabulary"]


def test_evaluation_settings_given_to_a_run_are_recorded_and_measure_anew(alone: Path, call: Call) -> None:
    before = (alone / RUN / "stages/train.json").read_bytes()
    assert values(call, "evaluate", RUN, "evaluate.max_bytes=1500")["bytes"] <= 1500
    assert (alone / RUN / "stages/train.json").read_bytes() == before
    assert config(alone / RUN)["evaluate"]["max_bytes"] == 1500
    changed = [e for e in read_events(alone / RUN / "events.jsonl") if e["kind"] == "config_changed"]
    assert [(e["key"], e["before"], e["after"]) for e in changed] == [("evaluate.max_bytes", 3000, 1500)]
    # The next verb on the run goes on with them.
    assert values(call, "run", RUN)["evaluated_tokens"] > 0
    assert config(alone / RUN)["evaluate"]["max_bytes"] == 1500


def test_after_an_evaluation_the_report_is_that_of_the_new_results(alone: Path, call: Call) -> None:
    ended = call("evaluate", RUN, 'evaluate.tasks=["held-out", "grammar_en"]')
    assert ended.out.splitlines()[-1] == f"report: {RUN}/report.html"
    page = (alone / RUN / "report.html").read_text()
    assert "grammar_en" in page
    assert "not finished" not in page
    assert "grammar_en" in json.loads((alone / RUN / "summary.json").read_text())["tasks"]


def test_settings_of_a_refused_evaluation_are_not_left_in_the_run(trained: Path, call: Call) -> None:
    before = config(trained / RUN)["evaluate"]
    assert call("evaluate", RUN, 'evaluate.tasks=["boolq"]').status == 2  # its data are not here
    assert config(trained / RUN)["evaluate"] == before


@pytest.mark.parametrize("given", [RUN, "tiny.toml"])
def test_evaluate_refuses_nothing_for_settings_that_it_does_not_use(given: str, trained: Path, call: Call) -> None:
    before = config(trained / RUN)
    others = (
        "train.schedule.peak_lr=1e-9",
        "model.layers=9",
        "checkpoint.keep_last=7",
        "prepare.filter.min_characters=99",
    )
    ended = call("evaluate", given, *others, "evaluate.samples=3")
    assert ended.status == 0, ended.err
    assert "evaluating with the run's own settings (checkpoint.keep_last: 2, not 7, model.layers: 2, not 9" in ended.err
    after = config(trained / RUN)
    assert after["evaluate"].pop("samples") == 3
    assert before["evaluate"].pop("samples") == 2
    assert {key: after[key] for key in before if key != "origins"} == {k: before[k] for k in before if k != "origins"}


def test_prepare_refuses_nothing_for_settings_that_it_does_not_use(trained: Path, call: Call) -> None:
    assert call("prepare", "tiny.toml", "train.schedule.peak_lr=1e-9", "model.layers=9").status == 0
    assert config(trained / RUN)["model"]["layers"] == 2
    assert call("prepare", "tiny.toml", "prepare.filter.min_characters=99").status == 2
    assert call("train", "tiny.toml", "model.layers=9").status == 2


def test_a_run_under_another_name_is_a_new_one_with_the_same_data(alone: Path, call: Call) -> None:
    ended = call("train", RUN, "name=other", "train.seed=2", "train.steps=2")
    assert ended.status == 0, ended.err
    assert config(alone / "runs/other")["train"]["seed"] == 2
    assert json.loads((alone / "runs/other/stages/prepare.json").read_text())["result"]["hash"]
    assert "seed" not in config(alone / RUN)["train"]


def test_a_run_that_was_moved_is_the_one_that_is_named(alone: Path, call: Call) -> None:
    (alone / "runs").rename(alone / "elsewhere")
    (alone / "elsewhere/tiny").rename(alone / "elsewhere/best")
    assert values(call, "evaluate", "elsewhere/best", "evaluate.max_bytes=1500")["bytes"] <= 1500
    assert config(alone / "elsewhere/best")["evaluate"]["max_bytes"] == 1500
    assert values(call, "train", "elsewhere/best", "train.steps=8")["step"] == 8
    assert not (alone / "runs").exists()


def test_the_newest_checkpoint_of_a_run_that_is_not_finished_is_measured(alone: Path, call: Call) -> None:
    shutil.rmtree(alone / RUN / "checkpoints/step-00000006")
    ended = call("evaluate", RUN, "--json")
    assert ended.status == 0, ended.err
    assert json.loads(ended.out)["step"] == 4
    assert "training stands at step 4, which is measured" in ended.err
    shutil.rmtree(alone / RUN / "checkpoints")
    ended = call("evaluate", RUN)
    assert ended.status == 2
    assert "no checkpoint yet; `ropewalk run runs/tiny` trains" in ended.err


def test_data_that_are_gone_are_prepared_again_from_the_settings_of_the_run(trained: Path, call: Call) -> None:
    (trained / "tiny.toml").unlink()
    shutil.rmtree(trained / "prepared")
    assert values(call, "evaluate", RUN, "evaluate.samples=3")["step"] == 6
    shutil.rmtree(trained / "prepared")
    shutil.rmtree(trained / "corpus")
    ended = call("evaluate", RUN, "evaluate.samples=4")
    assert ended.status == 2
    assert 'nothing matches "corpus/*.py"' in ended.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["evaluate", "runs/tinny"], "runs/tinny: no such recipe or run; did you mean `runs/tiny`?"),
        (["train", "tiny"], "tiny: no such recipe or run; did you mean `runs/tiny`?"),
        (["plan", "runs"], "runs: a folder without config.toml; there are the runs runs/tiny"),
        (["run", "nothing"], "nothing: no such recipe or run; there are the runs runs/tiny"),
        (
            ["run", "gone/tiny.toml"],
            "gone/tiny.toml: no such recipe; its run has the settings: name `runs/tiny` in its",
        ),
        (["monitor", "runs/tinny"], "runs/tinny: no such run directory; did you mean `runs/tiny`?"),
        (["report", "corpus"], "corpus: not a run directory; runs lie in `runs/NAME`; there are runs/tiny"),
        (["doctor", "data", RUN, "--tune"], "runs/tiny: --tune writes settings into a recipe"),
        (["plan", RUN, "train.stepz=3"], "unknown key `train.stepz`; did you mean `steps`?"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_wrong_path_gets_a_hint(arguments: list[str], told: str, trained: Path, call: Call) -> None:
    ended = call(*arguments)
    assert ended.status == 2
    assert told in ended.err
