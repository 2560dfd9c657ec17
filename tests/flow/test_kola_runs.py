"""KoLA's standardised scores: those of its own script for season 1, and of runs beside other models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.metric import SHARE, Metric, metrics_tree
from ropewalk.base.seal import write_sealed
from ropewalk.cli.main import main
from ropewalk.evaluate.kola import Results, read_reference, standardise
from ropewalk.flow import compare

SEASON_1 = Path(__file__).parents[3] / "shared" / "data" / "refs" / "kola-season1.json"

RAW = {
    "common": {"a": 20.0, "b": 10.0, "c": None},
    "rare": {"a": 6.0, "b": 0.0, "c": 0.0},
    "events": {"a": 50.0, "b": 70.0, "c": 30.0},
}
LEVELS = {"KM": ["common", "rare"], "KU": ["events"]}
OWN = Results(levels=LEVELS, raw=RAW, pooled=[["common", "rare"]])


def by_hand() -> dict[str, np.ndarray[Any, Any]]:
    pool = np.array([20, 10, 0, 6, 0, 0])
    events = np.array([50, 70, 30])
    return {
        "common": (pool[:3] - pool.mean()) / pool.std(),
        "rare": (pool[3:] - pool.mean()) / pool.std(),
        "events": (events - 50) / events.std(),
    }


def test_scores_are_pooled_then_standardised_then_stretched() -> None:
    found, expected = standardise(OWN), by_hand()
    cells = np.concatenate([*expected.values()])
    for task, values in expected.items():
        stretched = 100 * (values - cells.min()) / np.ptp(cells)
        assert [*found.tasks[task].values()] == pytest.approx(stretched)
    assert OWN.missing == [("common", "c")]  # and counts as 0
    assert found.levels["KM"]["a"] == pytest.approx((found.tasks["common"]["a"] + found.tasks["rare"]["a"]) / 2)
    overall = ((expected["common"] + expected["rare"]) / 2 + expected["events"]) / 2
    assert [*found.overall.values()] == pytest.approx(overall)


def test_a_task_that_all_models_solve_alike_tells_nothing() -> None:
    found = standardise(Results(levels=LEVELS, raw={**RAW, "rare": dict.fromkeys("abc", 5.0)}))
    assert found.tasks["rare"]["a"] == found.tasks["rare"]["c"]
    with pytest.raises(UserError, match="tells two models apart"):
        standardise(Results(levels=LEVELS, raw={"rare": dict.fromkeys("abc", 5.0)}))
    with pytest.raises(UserError, match="tells two models apart"):
        standardise(Results(levels=LEVELS, raw={}))


@pytest.mark.skipif(not SEASON_1.exists(), reason="KoLA's results are not part of the repository")
def test_every_cell_of_season_1_is_reproduced() -> None:
    """The scores that KoLA's analyse/unify.py makes of its results; "Avg" from the table that it prints."""
    found = standardise(read_reference(SEASON_1))
    expected = json.loads(SEASON_1.read_text())["standardised"]
    assert found.tasks.keys() == expected.keys()
    for task, scores in expected.items():
        assert found.tasks[task] == pytest.approx(scores, abs=1e-9)
    assert round(found.tasks["DocRED"]["GPT-4"], 1) == 100.0
    assert round(found.tasks["musique"]["GPT-4"], 1) == 72.4
    overall = {"GPT-4": 2.06, "GPT-3.5-turbo": 1.32, "InstructGPT_davinci_v2": 1.02, "Cohere-xlarge": 0.77}
    assert {model: round(found.overall[model], 2) for model in overall} == overall


def write_run(folder: Path, scores: dict[str, tuple[str, float, str]]) -> Path:
    """A run with a task per level, value and unit."""
    (folder / "stages").mkdir(parents=True)
    (folder / "evaluation").mkdir()
    tasks = {
        task: metrics_tree([Metric("score", value, unit=unit, level=level)])
        for task, (level, value, unit) in scores.items()
    }
    write_sealed(folder / "evaluation" / "results.json", {"format": 3, "step": 1, "tasks": tasks})
    return folder


def of_model(model: str) -> dict[str, tuple[str, float, str]]:
    levels = {task: level for level, tasks in LEVELS.items() for task in tasks}
    scores = {task: RAW[task][model] for task in RAW}
    # Half of the results are shares, half of them in percent.
    return {
        task: (levels[task], score / 100, SHARE) if task == "events" else (levels[task], score, "")
        for task, score in scores.items()
        if score is not None
    }


def test_runs_are_standardised_by_the_levels_of_their_tasks(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / model, of_model(model)) for model in "abc"]
    table = compare(runs, page=tmp_path / "page.html").standardised
    assert table is not None
    expected = standardise(Results(levels=LEVELS, raw=RAW))
    assert [*table.rows] == sorted("abc", key=lambda model: -expected.overall[model])
    for model in "abc":
        assert table.rows[model]["KM"] == pytest.approx(expected.levels["KM"][model])
        assert table.rows[model]["overall"] == pytest.approx(expected.overall[model])
        assert table.details[model]["events"] == pytest.approx(expected.tasks["events"][model])
    assert any("1 missing scores count as 0, as in KoLA: common of c" in note for note in table.notes)
    assert "Levels of knowledge" in (tmp_path / "page.html").read_text()


def test_one_run_is_standardised_beside_results_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = {task: {model: scores[model] for model in "bc"} for task, scores in RAW.items()}
    tree = {"levels": LEVELS, "pooled": [["common", "rare"]], "raw": {**others, "other": {"b": 1.0}}}
    tree["levels"] = {**LEVELS, "KA": ["other"]}
    (tmp_path / "others.json").write_text(json.dumps(tree))
    run = write_run(tmp_path / "a", of_model("a"))
    with pytest.raises(SystemExit):
        main(["compare", str(run), "--kola-reference", str(tmp_path / "others.json"), "--json"])
    table = json.loads(capsys.readouterr().out)["standardised"]
    assert table["rows"]["a"]["overall"] == pytest.approx(standardise(OWN).overall["a"])
    assert table["details"]["b"] == pytest.approx({task: cells["b"] for task, cells in standardise(OWN).tasks.items()})
    assert any("left out: other" in note for note in table["notes"])
    with pytest.raises(SystemExit):
        main(["compare", str(run), "--kola-reference", str(tmp_path / "others.json")])
    assert "Levels of knowledge" in capsys.readouterr().out


def test_runs_without_levels_are_not_standardised(tmp_path: Path) -> None:
    alike = [write_run(tmp_path / model, of_model("a")) for model in "ab"]
    assert compare(alike).standardised is None
    plain = [write_run(tmp_path / model, {"events": ("", 0.1, "")}) for model in "cd"]
    assert compare(plain).standardised is None


def test_a_run_that_was_not_asked_is_left_out_and_not_last(tmp_path: Path) -> None:
    asked = [write_run(tmp_path / model, of_model(model)) for model in "ab"]
    other = write_run(tmp_path / "other", {"plain": ("", 0.1, "")})
    table = compare([*asked, other]).standardised
    assert table is not None
    assert [*table.rows] == ["a", "b"]
    assert "left out, without any of these tasks: other" in table.notes
    assert compare([asked[0], other]).standardised is None


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ([], "write an object"),
        ({"levels": {"KX": []}, "raw": {}}, "`KX`: use KM, KU, KA, KC"),
        ({"levels": {"KM": []}, "raw": {"a": {}}}, "task `a` has no level"),
        ({"levels": {"KM": ["a"]}, "raw": {"a": {"m": "high"}}}, "raw: a: m: 'high' is no score"),
        ({"levels": {"KM": ["a"]}, "raw": {"a": 3}}, "a score for each model"),
    ],
)
def test_results_that_cannot_be_read_are_refused(tree: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "others.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(DataError, match=told):
        read_reference(path)
