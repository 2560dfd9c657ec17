"""Verbs that look at runs and change nothing: `monitor`, `compare`, `report`. They import little and answer at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.monitor.comparison import Comparison, compare_views
from ropewalk.monitor.report.comparison_page import write_comparison
from ropewalk.monitor.report.run_report import write_report
from ropewalk.monitor.run_view import read_run

from .follow_run import RunWatch, standing


def monitor(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Where the run in `folder` stands: as values and as lines."""
    return standing(read_run(folder))


def compare(runs: Sequence[Path], *, page: Path | None = None) -> Comparison:
    """Runs side by side: settings that differ, curves, results with intervals; also as a page, when it is named."""
    if len(runs) < 2:
        raise UserError("name two runs or more: ropewalk compare runs/ONE runs/OTHER")
    found = compare_views([(folder, read_run(folder)) for folder in runs])
    if page:
        write_comparison(found, page)
    return found


def watch(folder: Path, *, to: Sequence[str] = ()) -> RunWatch:
    """The run in `folder`, to be looked at again and again; `to` names trackers (`tensorboard=FOLDER`, `csv=FILE`) that
    hold its curves. A context manager."""
    return RunWatch(folder, to=to)


def report(folder: Path) -> Path:
    """Draws `report.html` of the run in `folder` from its files."""
    return write_report(folder)
