"""The run stage `report`: the run's figures in one object, and the page."""

from __future__ import annotations

from ropewalk.base.seal import write_sealed
from ropewalk.monitor.report.run_report import write_report

from .earlier_run import change_since_earlier
from .run_stages import OpenRun, Result
from .summary import summarize


def report_stage(run: OpenRun) -> Result:
    """Never skipped: the report is cheap, and shows the current state."""
    summary = summarize(run.folder, run.recipe)
    write_sealed(run.folder / "summary.json", summary)
    return {**summary, "report": str(write_report(run.folder, change=change_since_earlier(run.folder)))}
