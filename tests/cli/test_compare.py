"""Two runs side by side: what came of them, the settings that differ, curves along four axes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ropewalk.base.events import read_events
from ropewalk.cli.main import main
from ropewalk.monitor.comparison import LossCurve, compare_views
from ropewalk.monitor.run_view import RunView, read_run

from .conftest import Call

RUNS = ("runs/tiny", "runs/gentle")
SETTINGS = ["name=gentle", "train.schedule.peak_lr=1e-4", "train.log_every_steps=1", "train.steps=5"]


@pytest.fixture(scope="module")
def made(trained_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two") / "copy"
    shutil.copytree(trained_once, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(SystemExit) as stop:
            main(["run", "tiny.toml", *SETTINGS, "--json"])
    assert not stop.value.code
    return folder


@pytest.fixture
def two(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of both runs; we stand in it."""
    monkeypatch.chdir(made)
    return made


def test_runs_are_shown_side_by_side(two: Path, call: Call) -> None:
    told = json.loads(call("compare", *RUNS, "--json").out)
    ours = {run["run"]: run for run in told["runs"]}
    assert told["settings"].keys() == {one.split("=")[0] for one in SETTINGS[1:]}
    assert told["settings"]["train.schedule.peak_lr"][1] == 1e-4
    for folder, run in ours.items():
        events = list(read_events(two / folder / "events.jsonl"))
        steps = [event for event in events if event["kind"] == "step"]
        started = next(event for event in events if event["kind"] == "train_started")
        curve = run["curves"]["training"]
        assert curve["step"] == [event["step"] for event in steps]
        assert curve["tokens"] == [event["tokens"] for event in steps]
        assert curve["flops"] == pytest.approx([started["flops_per_token"] * event["tokens"] for event in steps])
        reads = [after - before for before, after in zip([0, *curve["tokens"]], curve["tokens"], strict=False)]
        seconds = [read / event["tokens_per_s"] for read, event in zip(reads, steps, strict=True)]
        assert run["training_s"] == pytest.approx(sum(seconds))
        summary = json.loads((two / folder / "summary.json").read_text())
        found = run["results"]["bits_per_byte"]
        assert found == {"value": summary["bits_per_byte"], "interval": summary["intervals"]["bits_per_byte"]}
        validations = [event["loss"] for event in events if event["kind"] == "validation"]
        assert run["curves"]["validation"]["loss"] == validations


@pytest.mark.parametrize(("axis", "unit"), [("step", "step"), ("tokens", "tokens"), ("flops", "FLOPs")])
def test_the_curves_run_along_what_is_asked_for(axis: str, unit: str, two: Path, call: Call) -> None:
    text = call("compare", *RUNS, "--by", axis).out
    table = text.partition("loss, in nats per token\n")[2].splitlines()
    assert table[0].startswith(unit)
    assert table[0].split()[-2:] == ["tiny", "gentle"]
    events = [list(read_events(two / run / "events.jsonl")) for run in RUNS]
    losses = [{event["step"]: event["loss"] for event in one if event["kind"] == "validation"} for one in events]
    first = min(losses[0].keys() & losses[1].keys())
    assert table[1].split()[-2:] == [f"{one[first]:.4f}" for one in losses]
    assert (table[1].split()[0] == str(first)) == (axis == "step")


def test_curves_along_time_meet_where_both_runs_have_been(two: Path, call: Call) -> None:
    table = call("compare", RUNS[0], RUNS[0], "--by", "time").out.partition("loss, in nats per token\n")[2]
    assert table.startswith("seconds of training")
    assert len(table.splitlines()) >= 2

    def view(run: str, quicker: float) -> tuple[Path, RunView]:
        found = read_run(Path(run))
        steps = [replace(step, tokens_per_s=step.tokens_per_s * quicker) for step in found.steps]
        return Path(run), replace(found, steps=tuple(steps))

    assert compare_views([view(RUNS[0], 1), view(RUNS[0], 1e6)]).places("time") == []


def test_the_table_has_intervals_and_differing_settings(two: Path, call: Call) -> None:
    text = call("compare", *RUNS).out
    assert re.search(r"held-out bits per byte( +\d\.\d{3} \(\d\.\d{3} to \d\.\d{3}\)){2}", text)
    assert re.search(r"train\.schedule\.peak_lr +\S+ +0\.0001", text)
    assert re.search(r"held-out bits per byte +gentle - tiny +\+\d.* (better|worse|not shown)\n", text)
    assert "cannot be compared" not in text
    assert "all settings are the same" in call("compare", RUNS[0], RUNS[0]).out


def test_other_data_is_told(two: Path, call: Call) -> None:
    assert call("run", "tiny.toml", "name=other", "prepare.tokenizer.vocab_size=290", "train.steps=2").status == 0
    assert "losses per token cannot be compared" in call("compare", RUNS[0], "runs/other").out


def test_the_page_has_a_chart_along_each_axis_for_each_loss(two: Path, call: Call) -> None:
    assert call("compare", *RUNS, "--html", "compare.html").status == 0
    page = Path("compare.html").read_text("utf-8")
    for name in ("step", "tokens", "FLOPs", "seconds of training"):
        assert page.count(f"<strong>By {name}</strong>") == 2
        assert f'data-counted="{name}"' in page
    assert page.count('data-name="gentle"') == 8
    assert page.count('class="pair"') == 2  # drawn for half the width each
    assert "train.schedule.peak_lr" in page


def test_the_training_loss_is_a_mean_of_steps_however_often_a_run_logs(two: Path) -> None:
    """Records that are means of 20 steps stay as they are; those of single steps are averaged to the same value."""
    record = read_run(Path(RUNS[0])).steps[0]
    losses = [6 - step / 20 for step in range(1, 61)]

    def view(every: int) -> tuple[Path, RunView]:
        means = [sum(losses[end - every : end]) / every for end in range(every, 61, every)]
        steps = [replace(record, step=(at + 1) * every, tokens=100.0 * (at + 1) * every) for at in range(len(means))]
        logged = tuple(replace(step, loss=mean) for step, mean in zip(steps, means, strict=True))
        return Path(f"every-{every}"), replace(read_run(Path(RUNS[0])), steps=logged)

    often, seldom = compare_views([view(1), view(20)]).sides
    assert seldom.training.loss == pytest.approx([sum(losses[end - 20 : end]) / 20 for end in (20, 40, 60)])
    assert [often.training.at("step", place) for place in (20, 40, 60)] == pytest.approx(seldom.training.loss)


def test_one_run_or_none_is_refused(two: Path, call: Call) -> None:
    assert "name two runs or more" in call("compare", RUNS[0]).err
    assert call("compare", RUNS[0], "runs/none").status == 2


def test_a_curve_is_read_between_its_points_and_not_outside() -> None:
    xs = (10.0, 20.0, 40.0)
    curve = LossCurve({"step": xs, "tokens": xs, "flops": xs, "time": xs}, (3.0, 2.0, 1.0))
    assert [curve.at("tokens", place) for place in (5, 10, 15, 30, 40, 41)] == [None, 3.0, 2.5, 1.5, 1.0, None]
