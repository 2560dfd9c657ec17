"""`ropewalk monitor`: the newest runs, one run followed, its curves for other tools."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ropewalk.base.events import EventLog, read_events, steps
from ropewalk.base.files import locked
from ropewalk.base.metric import flat_results
from ropewalk.cli.main import main
from tests.screen import Screen, terminal, written

from .conftest import Call

RUN = "runs/tiny"


def test_without_a_run_the_newest_are_listed(trained: Path, call: Call) -> None:
    for number in range(12):
        folder = Path(f"runs/old-{number}")
        shutil.copytree(RUN, folder)
        os.utime(folder / "events.jsonl", (1e9 + number, 1e9 + number))
    Path("runs/not-a-run").mkdir()
    with EventLog(Path(RUN)) as log:
        log.write("run_started")
    lines = call("monitor").out.splitlines()
    assert lines[0].split()[:2] == ["run", "state"]
    assert [line.split()[0] for line in lines[1:4]] == [RUN, "runs/old-11", "runs/old-10"]
    assert len(lines) == 11
    assert ("stopped" in lines[1], "6 of 6" in lines[1], "finished" in lines[2]) == (True, True, True)
    summary = json.loads(Path("runs/old-11/summary.json").read_text())
    assert json.loads(call("monitor", "--json").out)[1]["bits_per_byte"] == summary["bits_per_byte"]
    missing = call("monitor", "--runs", "nowhere")
    assert (missing.status, "--runs names" in missing.err) == (2, True)


def test_curves_of_a_real_run_are_those_of_its_events(trained: Path, call: Call) -> None:
    told = call("monitor", RUN, "--to", "csv=tiny.csv", "--to", "tensorboard=charts")
    assert (told.status, "5 points in csv=tiny.csv and tensorboard=charts" in told.out) == (0, True), told
    events = list(read_events(Path(RUN, "events.jsonl")))
    with open("tiny.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    expected = [(event["step"], event["loss"], event["grad_norm"]) for event in steps(events)]
    logged = [row for row in rows if row["loss"]]
    assert [(int(row["step"]), float(row["loss"]), float(row["grad_norm"])) for row in logged] == expected
    reader = EventAccumulator("charts/tiny")
    reader.Reload()
    found = [(event.step, event.value) for event in reader.Scalars("validation/loss")]
    assert found == [(event["step"], pytest.approx(event["loss"], rel=1e-6)) for event in steps(events, "validation")]
    assert (call("monitor", RUN, "--to", "csv").status, call("monitor", RUN, "--to", "cvs=x").status) == (2, 2)
    assert "did you mean `csv`?" in call("monitor", RUN, "--to", "cvs=x").err


def test_a_run_tells_its_two_measures_apart(trained: Path, call: Call) -> None:
    results = flat_results(json.loads(Path(RUN, "evaluation/results.json").read_text()))
    told = call("run", "tiny.toml").out
    assert f"{results['bits_per_byte']:.3f} held-out bits per byte ({results['documents']} whole documents)" in told
    validation = steps(list(read_events(Path(RUN, "events.jsonl"))), "validation")[-1]
    assert f"{validation['loss']:.4f} (4 held-out sequences), step 6" in call("monitor", RUN).out
    listed = call("monitor").out.splitlines()
    assert f"{results['bits_per_byte']:.3f} held-out bits per byte" in listed[1]
    with EventLog(Path(RUN)) as log:
        log.write("run_started")
    assert f"validation loss {validation['loss']:.4f}" in call("monitor").out.splitlines()[1]


def test_a_finished_run_is_shown_once_and_the_newest_is_the_default(trained: Path, call: Call) -> None:
    told = call("monitor", "--follow")
    assert told.out.count("\n") == 1
    assert told.out.startswith("finished  100%  loss ")
    assert json.loads(call("monitor", "--follow", "--json").out)["finished"]


def test_on_a_terminal_the_run_is_redrawn_in_place_and_ctrl_c_leaves_it(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    screen, shown = Screen(80), []
    with terminal(80) as (stream, reader):
        monkeypatch.setattr(sys, "stdout", stream)
        looks = 0

        def meanwhile(_: float) -> None:
            nonlocal looks
            screen.feed(written(reader))
            shown.append(screen.text)
            looks += 1
            if looks == 3:
                raise KeyboardInterrupt
            with EventLog(Path(RUN)) as log:
                log.write("step", step=6, loss=float(looks), tokens_per_s=1000.0, step_s=0.1)

        monkeypatch.setattr("time.sleep", meanwhile)
        with locked(Path(RUN)), pytest.raises(SystemExit) as stop:
            main(["monitor", RUN, "--follow"])
        screen.feed(written(reader))
    assert not stop.value.code
    assert ["loss 1.0000" in shown[1], "loss 2.0000" in shown[2]] == [True, True]
    assert screen.wrapped == 0
    for text in (*shown, screen.text):
        assert text.count("━") > 5
        assert text.count("stage train") == 1, "drawn in place"


def test_elsewhere_a_followed_run_is_told_line_by_line(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)

    def meanwhile(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", meanwhile)
    with locked(Path(RUN)), pytest.raises(SystemExit):
        main(["monitor", RUN, "--follow"])
    assert out.getvalue().count("\n") == 1
    assert "\x1b" not in out.getvalue()
