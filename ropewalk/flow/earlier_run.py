"""What has changed since the run that was evaluated before this one, for its report."""

from __future__ import annotations

from pathlib import Path

from ropewalk.base.errors import DamagedFile, DataError
from ropewalk.base.metric import read_tasks
from ropewalk.evaluate.results import RESULTS, read_results
from ropewalk.monitor.evaluation_view import Change

from .paired_runs import compare_items

MOST_LOOKED_AT = 8
"""Runs beside this one that are looked at, the newest first."""


def change_since_earlier(run: Path) -> Change | None:
    """The newest run beside `run` that was evaluated before it and has scored some of the same items or documents, and
    what differs; None without one."""
    if not (run / RESULTS).is_file():
        return None
    own = (run / RESULTS).stat().st_mtime
    beside = [path.parents[1] for path in run.resolve().parent.glob(f"*/{RESULTS}")]
    evaluated = {path: (path / RESULTS).stat().st_mtime for path in beside if path != run.resolve()}
    earlier = sorted((path for path, time in evaluated.items() if time < own), key=lambda path: -evaluated[path])
    for path in earlier[:MOST_LOOKED_AT]:
        try:
            trees = [read_results(each) for each in (path, run)]
        except (DamagedFile, DataError):
            continue
        found = compare_items([(each, read_tasks(tree)) for each, tree in zip((path, run), trees, strict=True)])
        if found.differences:
            by_name = {(each.task, each.metric): each for each in found.differences}
            return Change(path.name, trees[0].get("step"), by_name)
    return None
