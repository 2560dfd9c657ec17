"""The page: one file, closed in itself, true to the files it was drawn from."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.events import EventLog
from ropewalk.cli.run_results import evaluation_text
from ropewalk.monitor.draw.markup import element, escape
from ropewalk.monitor.headline import key_figures
from ropewalk.monitor.report.run_report import render, write_report
from ropewalk.monitor.run_text import status_lines
from ropewalk.monitor.run_view import read_run

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and fails on a tag that closes another."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def test_the_page_refers_to_nothing_outside_itself(run: Path) -> None:
    page = write_report(run).read_text(encoding="utf-8")
    reader = Reader(page)
    outside = [a for _, a in reader.tags if {"src", "href", "xlink:href", "srcset", "action"} & a.keys()]
    assert not outside
    assert not {tag for tag, _ in reader.tags} & {"link", "img", "iframe", "object", "embed", "base"}
    assert not re.search(r"@import|@font-face|url\(|https?://", page)
    assert len(page) < 300_000


@pytest.mark.parametrize("which", ["run", "half_run"])
def test_every_tag_of_the_page_is_closed(which: str, request: pytest.FixtureRequest) -> None:
    reader = Reader(write_report(request.getfixturevalue(which)).read_text(encoding="utf-8"))
    assert reader.open == []


def test_hostile_text_in_samples_is_shown_and_never_run(run: Path) -> None:
    reader = Reader(write_report(run).read_text(encoding="utf-8"))
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert not [a for _, a in reader.tags if any(name.startswith("on") for name in a)]
    assert "</pre><script>alert('x')</script><img src=x onerror=alert(1)> & \ufffd \ufffd" in reader.words
    assert "<b>code</b> · a\"b" in reader.words  # fmt: skip


def test_hostile_text_in_every_other_file_is_only_text(run: Path) -> None:
    evil = "<script>boo()</script>"
    results = json.loads((run / "evaluation/results.json").read_text())
    results["domains"][evil] = {"bits_per_byte": 1.0}
    (run / "evaluation/results.json").write_text(json.dumps(results))
    with open(run / "events.jsonl", "a") as file:
        for event in (
            {"kind": "warning", "message": evil},
            {"kind": "config_changed", "key": evil, "after": evil},
        ):
            file.write(json.dumps({"format": 1, "time": 1.76e9, "rank": 0, **event}) + "\n")
    (run / "stages" / "<b>.json").write_text(json.dumps({"seconds": 1.0}))
    (run / "config.toml").write_text(f'name = "{evil}"\n[origins]\nname = "{evil}"\n')
    reader = Reader(write_report(run).read_text(encoding="utf-8"))
    assert [tag for tag, _ in reader.tags].count("script") == 1
    assert evil in reader.words


def test_the_numbers_on_the_page_are_those_in_the_files(run: Path) -> None:
    results = json.loads((run / "evaluation/results.json").read_text())
    words = " ".join(Reader(write_report(run).read_text(encoding="utf-8")).words)
    shown = [results, *results["domains"].values()]
    for values in shown:
        for key in ("bits_per_byte", "zlib_bits_per_byte", "xz_bits_per_byte"):
            assert f"{values[key]:.3f}" in words
        assert f"{100 * values['accuracy']:.1f} %" in words
    assert f"{results['loss']:.3f}" in words
    assert "1.32 held-out bits per byte; zlib 2.35, xz 2.01" in words


def test_the_validation_loss_and_the_evaluation_have_different_names_everywhere(run: Path) -> None:
    """They measure different text: the first sequences while training, whole documents at the end."""
    with EventLog(run) as log:
        log.write("validation", step=300, loss=2.5, bits_per_byte=1.1, sequences=64)
    summary = json.loads((run / "summary.json").read_text())
    view = read_run(run)
    tiles = {figure.name: (figure.value, figure.note) for figure in key_figures(view)}
    assert tiles["Validation loss"] == ("2.500", "nats per token, 64 held-out sequences, step 300")
    assert tiles["Held-out bits per byte"] == ("1.317", "whole documents, 398 kB, loss 2.773, perplexity 16")
    words = " ".join(Reader(write_report(run).read_text(encoding="utf-8")).words)
    assert "validation (64 held-out sequences)" in words
    lines = "\n".join(status_lines(view))
    assert re.search(r"validation loss +2\.5000 \(64 held-out sequences\), step 300", lines)
    assert "1.32 held-out bits per byte" in lines
    assert "1.317 held-out bits per byte (33 whole documents)" in evaluation_text({**summary, "documents": 33})


def test_the_loss_curve_carries_every_logged_loss_that_counts(run: Path) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    last = {event["step"]: event["loss"] for event in events if event["kind"] == "step"}
    tags = Reader(write_report(run).read_text(encoding="utf-8")).tags
    curve = next(a for _, a in tags if a.get("data-name") == "training")
    assert [int(x) for x in (curve["data-xs"] or "").split()] == sorted(last)
    assert (curve["data-ys"] or "").split() == [f"{last[step]:.4f}" for step in sorted(last)]


def test_a_half_finished_run_gives_a_page_that_says_what_is_missing(half_run: Path) -> None:
    words = " ".join(Reader(write_report(half_run).read_text(encoding="utf-8")).words)
    assert "This run is not finished." in words
    assert "evaluation/results.json: not written yet" in words
    assert "step 183 of 300" in words
    assert "No samples have been drawn yet." in words


def test_an_empty_folder_gives_a_page_whose_sections_say_why_they_are_empty(tmp_path: Path) -> None:
    (tmp_path / "stages").mkdir()
    reader = Reader(write_report(tmp_path).read_text(encoding="utf-8"))
    empty = [a for _, a in reader.tags if a.get("class") == "empty"]
    sections = [tag for tag, _ in reader.tags if tag == "section"]
    # Only the list of events needs no reason: a run without events is normal.
    assert len(empty) == len(sections)


@pytest.mark.parametrize("damage", ["", "null", "[]", "{", '{"format": 1}', '"x"', "\x00\xff", '{"domains": 3}'])
@pytest.mark.parametrize(
    "name",
    [
        "config.toml",
        "events.jsonl",
        "samples.jsonl",
        "summary.json",
        "plan.json",
        "evaluation/results.json",
        "stages/train.json",
        "stages/prepare.json",
        "manifest.json",
    ],
)
def test_no_damaged_file_prevents_the_page(run: Path, name: str, damage: str) -> None:
    path = next(run.parent.parent.glob(f"prepared/*/{name}"), run / name)
    path.write_bytes(damage.encode("latin-1"))
    assert Reader(render(read_run(run))).open == []


@given(st.text())
def test_any_text_survives_escaping_as_text(text: str) -> None:
    reader = Reader(element("pre", text, title=text))
    assert [tag for tag, _ in reader.tags] == ["pre"]
    escape(text).encode("utf-8")
    assert "".join(reader.words) == html.unescape(escape(text))


STORIES = {
    "phase_started": ({"step": 120, "phase": 1, "name": "anneal", "start_from": "runs/base"}, "anneal, after step 120"),
    "anomaly": ({"step": 1234, "what": "loss spike", "action": "rollback"}, "step 1,234: loss spike (rollback)"),
    "rolled_back": (
        {"step": 1200, "failed_step": 1234, "left_out": 1},
        "to step 1,200, to repeat step 1,234 without 1",
    ),
    "stopped_early": ({"step": 900, "best_step": 600}, "at step 900, with the weights of step 600"),
}


@pytest.mark.parametrize("kind", STORIES)
def test_what_happened_in_training_is_told(run: Path, kind: str) -> None:
    fields, words = STORIES[kind]
    with open(run / "events.jsonl", "a") as file:
        file.write(json.dumps({"format": 1, "time": 1_760_000_400, "rank": 0, "kind": kind, **fields}) + "\n")
    assert words in html.unescape(render(read_run(run)))


def test_a_run_of_one_phase_does_not_speak_of_phases(run: Path) -> None:
    event = {"format": 1, "time": 1_760_000_400, "rank": 0, "kind": "phase_started", "step": 0, "phase": 0, "name": "1"}
    with open(run / "events.jsonl", "a") as file:
        file.write(json.dumps({**event, "start_from": ""}) + "\n")
    assert "phase started" not in render(read_run(run))
