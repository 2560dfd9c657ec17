"""The report's change since an earlier run: paired, of the newest run beside it that shares items."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.metric import SHARE, Metric, metrics_tree
from ropewalk.evaluate.results import DOCUMENTS, ITEMS, RESULTS, SAMPLES, write_results
from ropewalk.flow.earlier_run import change_since_earlier
from ropewalk.flow.view_runs import report


def evaluated(run: Path, right: list[int], *, time: int, task: str = "quiz") -> Path:
    """A run with items of a task, whose results were written at `time`."""
    run.mkdir(parents=True)
    (run / "config.toml").write_text('name = "x"\n')
    items = [
        {
            "task": task,
            "key": str(n),
            "group": "",
            "prompt": "",
            "prediction": "",
            "reference": "",
            "scores": {"acc": s},
        }
        for n, s in enumerate(right)
    ]
    accuracy = Metric("acc", sum(right) / len(right), n=len(right), unit=SHARE)
    lines: dict[str, list[dict[str, Any]]] = {SAMPLES: [], DOCUMENTS: [], ITEMS: items}
    write_results(run, {"step": 10 * time, "tasks": {task: metrics_tree([accuracy])}}, lines)
    os.utime(run / RESULTS, (time, time))
    return run


def test_the_newest_earlier_run_with_shared_items_is_compared(tmp_path: Path) -> None:
    evaluated(tmp_path / "oldest", [0] * 20, time=1)
    evaluated(tmp_path / "before", [1, 0] * 10, time=2)
    evaluated(tmp_path / "other", [1] * 20, time=3, task="other quiz")
    run = evaluated(tmp_path / "now", [1] * 20, time=4)
    evaluated(tmp_path / "later", [0] * 20, time=5)
    found = change_since_earlier(run)
    assert found is not None
    assert (found.run, found.step) == ("before", 20)
    assert found.differences["quiz", "acc"].value == pytest.approx(0.5)
    assert found.differences["quiz", "acc"].verdict == "better"
    assert change_since_earlier(tmp_path / "oldest") is None
    assert "change since before, step 20" in report(run).read_text("utf-8")


def test_a_run_that_is_not_evaluated_has_changed_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert change_since_earlier(tmp_path / "run") is None
