"""Runs that scored the same questions and documents are compared on these."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.metric import SHARE, Metric, metrics_tree
from ropewalk.base.seal import sealed_lines, write_sealed
from ropewalk.cli.main import main
from ropewalk.evaluate.metrics.paired import paired
from ropewalk.flow import compare


def write_run(
    folder: Path,
    scores: dict[str, list[float]],
    *,
    nats: dict[str, float] | None = None,
    signature: str = "one",
    group: str = "",
) -> Path:
    """A run with a task `quiz` whose items have these scores by metric, and documents of 100 bytes with these nats."""
    (folder / "stages").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    metrics = [Metric(name, 0.5, (0.4, 0.6), 9, unit=SHARE, signature=signature) for name in scores]
    bits = Metric("bits_per_byte", 2.0, (1.9, 2.1), 3, of="whole document", unit="bits", better="lower")
    tasks = {"held-out": metrics_tree([bits]), "quiz": metrics_tree(metrics)}
    write_sealed(folder / "evaluation" / "results.json", {"format": 3, "step": 1, "tasks": tasks})
    count = len(next(iter(scores.values()), []))
    rows: list[dict[str, Any]] = [
        {"task": "quiz", "key": f"q{i}", "group": group, "scores": {name: scores[name][i] for name in scores}}
        for i in range(count)
    ]
    (folder / "evaluation" / "items.jsonl").write_bytes(sealed_lines(rows))
    documents = [{"key": key, "bytes": 100, "nats": value, "domain": ""} for key, value in (nats or {}).items()]
    (folder / "evaluation" / "documents.jsonl").write_bytes(sealed_lines(documents))
    return folder


RIGHT = [1.0] * 10 + [0.0] * 30
MORE = [1.0] * 9 + [0.0] * 2 + [1.0] * 12 + [0.0] * 17  # one lost, twelve won


def test_runs_are_compared_on_the_items_that_both_have_scored(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", {"acc": RIGHT}, nats={"x": 100.0, "y": 200.0, "only here": 5.0})
    second = write_run(tmp_path / "b", {"acc": [*MORE, 1.0]}, nats={"y": 150.0, "x": 90.0, "z": 7.0})
    found = compare([first, second], page=tmp_path / "page.html")
    bits, accuracy = found.paired
    expected = paired(RIGHT, MORE)
    assert (accuracy.value, accuracy.p_value, accuracy.n) == (expected.difference, expected.p_value, 40)
    assert accuracy.p_value == pytest.approx(2 * 14 / 2**13)
    assert accuracy.p_adjusted == pytest.approx(2 * accuracy.p_value)
    assert (accuracy.verdict, accuracy.unit) == ("better", SHARE)
    assert bits.value == pytest.approx(-60 / math.log(2) / 200)
    assert (bits.n, bits.of, bits.verdict) == (2, "whole document", "not shown")
    assert "the intervals of held-out bits per byte overlap" not in " ".join(found.notes)
    html = (tmp_path / "page.html").read_text()
    assert "Paired differences" in html
    assert "+27.5 points" in html


def test_the_table_and_json_say_which_run_is_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, {"acc": scores})) for name, scores in (("a", MORE), ("b", RIGHT))]
    for arguments in ([*runs], [*runs, "--json"]):
        with pytest.raises(SystemExit):
            main(["compare", *arguments])
    text, _, tree = capsys.readouterr().out.partition("{")
    row = next(line for line in text.splitlines() if line.startswith("quiz acc") and "Mc" in line)
    assert row.split()[-1] == "worse"
    assert "-27.5 points" in row
    assert "Holm" in text
    (paired_tree,) = json.loads("{" + tree)["paired"]
    assert (paired_tree["verdict"], paired_tree["n"], paired_tree["runs"]) == ("worse", 40, [0, 1])


def test_what_is_not_paired_is_never_called_different(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", {"acc": [1.0] * 40})
    second = write_run(tmp_path / "b", {"acc": [0.0] * 40}, signature="two")
    found = compare([first, second])
    assert found.paired == ()
    assert "quiz acc was computed in two ways: one; two" in found.notes
    (second / "evaluation" / "items.jsonl").unlink()
    unpaired = compare([first, second])
    assert unpaired.paired == ()
    assert "the intervals of held-out bits per byte overlap" in " ".join(unpaired.notes)


def test_a_damaged_file_is_named_and_the_rest_compared(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, {"acc": RIGHT}, nats={"x": 1.0, "y": 2.0}) for name in "ab")
    path = second / "evaluation" / "items.jsonl"
    path.write_bytes(path.read_bytes().replace(b"1.0", b"0.0", 1))
    found = compare([first, second])
    assert [each.metric for each in found.paired] == ["bits_per_byte"]
    assert any("items.jsonl is damaged" in note for note in found.notes)


def test_a_question_that_is_asked_twice_is_paired_twice(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, {"acc": RIGHT}) for name in "ab")
    for run in (first, second):
        row = {"task": "quiz", "key": "same", "scores": {"acc": 1.0}}
        (run / "evaluation" / "items.jsonl").write_bytes(sealed_lines([row, row, {**row, "task": "other"}]))
    assert [(each.task, each.n) for each in compare([first, second]).paired] == [("quiz", 2), ("other", 1)]


def test_a_third_run_is_compared_with_the_first(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, {"acc": scores}) for name, scores in (("a", RIGHT), ("b", RIGHT), ("c", MORE))]
    assert [(each.runs, each.value) for each in compare(runs).paired] == [((0, 1), 0), ((0, 2), 0.275)]
