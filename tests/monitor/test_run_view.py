"""Reading a run: the account that counts, whatever the state of its files."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.base.files import locked
from ropewalk.flow.view_runs import standing
from ropewalk.monitor.headline import median_pace, recent_pace, seconds_left, verdict
from ropewalk.monitor.report.run_report import write_report
from ropewalk.monitor.run_list import newest_runs
from ropewalk.monitor.run_text import status_lines
from ropewalk.monitor.run_view import read_run


def test_steps_undone_by_a_restore_do_not_count(run: Path) -> None:
    view = read_run(run)
    assert [step.step for step in view.steps] == list(range(3, 301, 3))
    assert view.saved_step == 300
    assert view.starts == 2
    assert view.finished


def test_a_restore_without_new_steps_goes_back_to_the_checkpoint(half_run: Path) -> None:
    with open(half_run / "events.jsonl", "a") as file:
        file.write('\n{"format": 1, "time": 1760000300, "rank": 0, "kind": "restored", "step": 150}\n')
    view = read_run(half_run)
    assert view.steps[-1].step == 150
    assert view.validations[-1].step == 150


def test_a_torn_last_line_is_skipped(half_run: Path) -> None:
    view = read_run(half_run)
    assert view.steps[-1].step == 183
    assert not view.finished


def test_stages_stand_in_the_order_they_run(run: Path) -> None:
    assert [stage.name for stage in read_run(run).stages] == ["prepare", "plan", "train", "evaluate"]


def test_a_stage_that_was_started_and_not_finished_has_no_seconds(half_run: Path) -> None:
    states = {stage.name: (stage.state, stage.seconds) for stage in read_run(half_run).stages}
    assert states == {"prepare": ("finished", 21.4), "plan": ("finished", 0.2), "train": ("unfinished", None)}


def test_settings_remember_where_they_came_from(run: Path) -> None:
    origins = {setting.key: setting.origin for setting in read_run(run).settings}
    assert origins["train.steps"] == "command line: train.steps=300"
    assert origins["prepare.sources.1.name"] == "recipes/tiny.toml:9"
    assert origins["model.layers"] == "default"


def test_numbers_that_are_not_finite_are_read_and_left_out_of_the_curve(half_run: Path) -> None:
    with open(half_run / "events.jsonl", "a") as file:
        event = {"format": 1, "time": 1760000301, "rank": 0, "kind": "step", "step": 186, "loss": "nan"}
        file.write("\n" + json.dumps(event) + "\n")
    page = write_report(half_run).read_text()
    assert "not finite at 1 points, first at step 186" in page


def test_warnings_of_other_ranks_are_heard(run: Path) -> None:
    event = {"format": 1, "time": 1760000001, "rank": 3, "kind": "warning", "message": "slow disk"}
    (run / "events-3.jsonl").write_text(json.dumps(event) + "\n")
    assert "rank 3: slow disk" in write_report(run).read_text()


def test_a_relative_prepared_folder_is_found_from_anywhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = json.loads((run / "stages/prepare.json").read_text())
    stage["result"]["folder"] = os.path.relpath(stage["result"]["folder"], tmp_path)
    (run / "stages/prepare.json").write_text(json.dumps(stage))
    monkeypatch.chdir("/")
    assert read_run(run).manifest["recipe_hash"] == "5f0c9a41d27be083"


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such run directory"):
        read_run(tmp_path / "absent")


def test_the_time_left_follows_from_the_pace_of_the_last_steps(half_run: Path) -> None:
    view = read_run(half_run)
    left = seconds_left(view)
    assert left is not None
    assert left == pytest.approx((300 - 183) * 8192 / 14_100, rel=0.05)


def test_the_pace_of_a_run_that_goes_on_is_that_of_its_last_steps(half_run: Path) -> None:
    view = read_run(half_run)
    slow = [dataclasses.replace(step, tokens_per_s=100.0) for step in view.steps[-20:]]
    view = dataclasses.replace(view, steps=(*view.steps[:-20], *slow))
    assert recent_pace(view) == 100.0
    assert median_pace(view) > 10_000


def test_the_console_tells_how_far_an_unfinished_run_has_come(half_run: Path) -> None:
    with locked(half_run):
        text = "\n".join(status_lines(read_run(half_run)))
    last = read_run(half_run).steps[-1]
    running = f"running (process {os.getpid()})"
    for part in (running, "step 183 of 300", f"loss {last.loss:.4f}", "tokens/s", "about 1 min", "not written yet"):
        assert part in text


def test_the_console_tells_a_dead_run_from_a_living_one(half_run: Path) -> None:
    (half_run / "worker.log").write_text("step 183\nwriting x: No space left on device\n")
    text = "\n".join(status_lines(read_run(half_run)))
    for part in ("stopped, step 183 of 300", "continues it", "No space left on device"):
        assert part in text
    assert "at this pace" not in text


def test_a_training_that_a_worker_ended_is_trained(half_run: Path) -> None:
    with open(half_run / "events.jsonl", "a") as file:
        event = {"format": 1, "time": 1760000300, "rank": 0, "kind": "train_finished", "step": 300, "seconds": 88.2}
        file.write("\n" + json.dumps(event) + "\n")
    view = read_run(half_run)
    assert [(stage.state, stage.seconds) for stage in view.stages if stage.name == "train"] == [("finished", 88.2)]
    line = status_lines(view)[0]
    assert "trained, step 183 of 300" in line
    assert line.endswith("`ropewalk run` evaluates it")


def test_a_training_begun_again_is_not_finished_by_its_earlier_end(half_run: Path) -> None:
    with open(half_run / "events.jsonl", "a") as file:
        for kind, more in (("train_finished", {"step": 300, "seconds": 88.2}), ("stage_started", {"stage": "train"})):
            file.write("\n" + json.dumps({"format": 1, "time": 1760000300, "rank": 0, "kind": kind, **more}) + "\n")
    assert "stopped, step 183 of 300" in status_lines(read_run(half_run))[0]


def test_the_console_gives_the_verdict_of_a_finished_run_and_its_report(run: Path) -> None:
    path = write_report(run)
    lines = status_lines(read_run(run))
    assert lines[0] == f"stdlib-tiny: finished; {verdict(read_run(run))}"
    assert lines[-1].endswith(str(path))
    assert not any("left" in line.split()[:1] for line in lines)


def test_the_console_speaks_of_a_run_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    assert "training has not begun" in status_lines(read_run(tmp_path))[0]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run directory"):
        read_run(tmp_path)


def test_a_recipe_in_the_place_of_its_run_is_answered_with_the_run(half_run: Path) -> None:
    other = half_run.with_name(f"{half_run.name}1")
    shutil.copytree(half_run, other)  # a name that is near to the recipe's, too
    for run in (half_run, other):
        with pytest.raises(DataError) as raised:
            read_run(run.with_name(f"{run.name}.toml"))
        assert f"it is a recipe, whose run may be `{run}`" in str(raised.value)


@pytest.mark.parametrize(
    ("later", "finished"),
    [
        (["run_started", "stage_skipped", "stage_skipped"], True),
        (["run_started", "stage_skipped", "stage_started"], False),
        (["run_started", "stage_skipped", "stage_started", "stage_finished"], True),
        (["run_started", "continued"], False),
        (["run_started"], False),
    ],
)
def test_a_verb_that_found_nothing_to_do_leaves_a_run_finished(run: Path, later: list[str], finished: bool) -> None:
    with open(run / "events.jsonl", "a") as file:
        for kind in later:
            told = {"format": 1, "time": 1790000000, "rank": 0, "kind": kind, "stage": "evaluate", "from_step": 1}
            file.write(json.dumps(told) + "\n")
    assert read_run(run).finished == finished
    assert [line.state for line in newest_runs(run.parent)] == ["finished" if finished else "stopped"]
    with locked(run):
        assert not read_run(run).finished, "a start that goes on may still find work"


def test_the_interval_between_saves_is_told_with_its_reason(half_run: Path) -> None:
    assert read_run(half_run).saving == {}
    decided = {
        "step": 180,
        "interval_s": 25.0,
        "steps": 43,
        "bound": "failures",
        "blocked_s": 0.25,
        "slowed_s": 0.25,
        "persist_s": 2.0,
        "step_s": 0.58,
        "mtbf_s": 1800.0,
        "failures": 2,
    }
    with open(half_run / "events.jsonl", "a") as file:
        for event in ({**decided, "bound": "overhead"}, decided):
            told = {"format": 1, "time": 1760000301, "rank": 0, "kind": "save_interval", **event}
            file.write("\n" + json.dumps(told) + "\n")
    view = read_run(half_run)
    line = "every 43 steps (25 s), as failures demand; each costs 0.5 s; 30 min 00 s between failures (2 failures seen)"
    assert any(line in row for row in status_lines(view))
    assert "as failures demand; each costs 0.5 s; 30 min 00 s between failures" in write_report(half_run).read_text()
    value = standing(view)[0]["save_interval"]
    assert (value["steps"], value["bound"], value["failures"]) == (43, "failures", 2)
