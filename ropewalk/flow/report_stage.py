"""The run stage `report`: the run's figures in one object, what changed since an earlier run, and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ropewalk.base.errors import RopewalkError
from ropewalk.base.metric import read_tasks
from ropewalk.base.seal import write_sealed
from ropewalk.evaluate.results import RESULTS, read_results
from ropewalk.monitor.evaluation_view import CHANGE
from ropewalk.monitor.report.run_report import write_report

from .paired_runs import compare_items
from .run_stages import OpenRun, Result
from .summary import summarize

MOST_EARLIER = 5
"""Earlier runs that are looked at for one that was asked the same questions."""


def report_stage(run: OpenRun) -> Result:
    """Never skipped: the report is cheap, and shows the current state."""
    summary = summarize(run.folder, run.recipe)
    write_sealed(run.folder / "summary.json", summary)
    write_change(run.folder)
    return {**summary, "report": str(write_report(run.folder))}


def write_change(folder: Path) -> None:
    """Writes how the results differ from those of the run beside this one that was evaluated last before it, on the
    questions that both were asked."""
    path = folder / CHANGE
    for earlier in _evaluated_before(folder)[:MOST_EARLIER]:
        tree = _change(earlier, folder)
        if tree:
            write_sealed(path, tree)
            return
    path.unlink(missing_ok=True)


def _evaluated_before(folder: Path) -> list[Path]:
    """Other runs with results that are older than those of `folder`, the newest first."""
    try:
        now = (folder / RESULTS).stat().st_mtime
    except OSError:
        return []
    found = []
    for path in folder.resolve().parent.glob(f"*/{RESULTS}"):
        other, when = path.parent.parent, path.stat().st_mtime
        if other != folder.resolve() and when <= now:
            found.append((when, other))
    return [other for _, other in sorted(found, reverse=True)]


def _change(earlier: Path, folder: Path) -> dict[str, Any]:
    try:
        before, now = read_results(earlier), read_results(folder)
        paired = compare_items([(earlier, read_tasks(before)), (folder, read_tasks(now))]).differences
    except RopewalkError:  # what cannot be read cannot be compared
        return {}
    tasks: dict[str, dict[str, Any]] = {}
    for each in paired:
        tasks.setdefault(each.task, {})[each.metric] = {"difference": each.value, "p": each.p_adjusted, "n": each.n}
    return {"run": earlier.name, "step": before.get("step"), "tasks": tasks} if tasks else {}
