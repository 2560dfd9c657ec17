"""A user's evaluation task in one file beside the recipe: run, kept, shown and compared like ours."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path

import pytest

from ropewalk.cli.main import main
from tests.flow.tiny import write_tiny

OURS = Path(__file__).with_name("capitals.py")
TASKS = 'evaluate.tasks=["held-out", "capitals:Capitals"]'
RUN = Path("runs/tiny")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0), *capsys.readouterr()


def test_a_task_of_a_user_is_run_kept_shown_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(OURS.read_text().splitlines()) < 60
    recipe = write_tiny(tmp_path)
    shutil.copy(OURS, tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe.write_text(recipe.read_text().replace("[evaluate]", f"[evaluate]\n{TASKS.removeprefix('evaluate.')}"))
    status, out, err = call(capsys, "run", "tiny.toml")
    assert status == 0, err
    assert re.search(r"evaluation +\d+\.\d % capitals accuracy \(4 questions\), chance 25\.0 %", out)

    results = json.loads((RUN / "evaluation/results.json").read_text())
    assert list(results["tasks"]) == ["held-out", "capitals"]
    accuracy = results["tasks"]["capitals"]["accuracy"]
    assert accuracy["references"] == {"chance": 0.25}
    assert 0 <= accuracy["interval"][0] <= accuracy["value"] <= accuracy["interval"][1] <= 1
    summary = json.loads((RUN / "summary.json").read_text())
    assert summary["tasks"] == results["tasks"]
    assert summary["accuracy"] == results["tasks"]["held-out"]["accuracy"]["value"]
    samples = [json.loads(line) for line in (RUN / "samples.jsonl").read_text().splitlines()[1:]]
    assert [sample["source"] for sample in samples] == ["capitals"] * 4

    page = html.unescape((RUN / "report.html").read_text())
    shown = f"{100 * accuracy['value']:.1f} %"
    assert all(words in page for words in ("Capitals accuracy", "chance", "recall", shown))
    compared = call(capsys, "compare", str(RUN), str(RUN))[1]
    assert re.search(rf"capitals accuracy( +{re.escape(shown)} \(.+ to .+\)){{2}}", compared)

    # Edited, it is measured anew; alone, it is the headline. The run itself goes on.
    task = tmp_path / "capitals.py"
    task.write_text(task.read_text().replace('"chance": 1 / n', '"chance": 0.5 / n'))
    status, out, err = call(capsys, "evaluate", str(RUN), 'evaluate.tasks=["capitals:Capitals"]', "--json")
    assert status == 0, err
    (found,) = json.loads(out)["tasks"].values()
    assert found["accuracy"] == {**accuracy, "references": {"chance": 0.125}}
    assert call(capsys, "run", "tiny.toml", 'evaluate.tasks=["capitals:Capitals"]')[0] == 0
    assert f"{shown} capitals accuracy; chance 12.5 %" in html.unescape((RUN / "report.html").read_text())

    status, _, err = call(capsys, "evaluate", str(RUN), 'evaluate.tasks=["capitals:Capital"]')
    assert (status, "has no `Capital`" in err) == (2, True)
    status, _, err = call(capsys, "evaluate", "tiny.toml", 'evaluate.tasks=["held_out"]')
    assert (status, 'did you mean "held-out"?' in err) == (2, True)
