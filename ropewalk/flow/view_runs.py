"""Verbs that only read runs: `monitor`, `compare`, `report`. They import little and respond immediately."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.files import lock_owner
from ropewalk.base.metric import ScoreTable, Tasks
from ropewalk.monitor.comparison import Comparison, compare_views, labels_of
from ropewalk.monitor.follow import Feed, LiveCurve, is_over, open_tracker
from ropewalk.monitor.report.comparison_page import write_comparison
from ropewalk.monitor.report.run_report import write_report
from ropewalk.monitor.run_list import newest_runs
from ropewalk.monitor.run_text import status_lines
from ropewalk.monitor.run_view import RunView, check_run, read_run

from .earlier_run import change_since_earlier
from .paired_runs import compare_items

LOOK_EVERY_S = 1.0
SHARE = 0.1
"""Maximum share of its time that a watch spends working: very large runs are polled less often."""


def monitor(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The status of the run in `folder`, as values and as lines."""
    return standing(read_run(folder))


def compare(runs: Sequence[Path], *, page: Path | None = None, kola_reference: Path | None = None) -> Comparison:
    """Compares runs: settings that differ, curves, results with intervals, shared items; also writes the HTML `page`,
    if given. `kola_reference` has results of other models in KoLA's tasks (evaluate/kola.py)."""
    if len(runs) < (1 if kola_reference else 2):
        raise UserError("name two runs or more: ropewalk compare runs/ONE runs/OTHER")
    views = [(folder, read_run(folder)) for folder in runs]
    pairs = compare_items([(folder, view.tasks) for folder, view in views])
    labels = labels_of([str(folder) for folder in runs])
    tasks = [(label, view.tasks) for label, (_, view) in zip(labels, views, strict=True)]
    scores = _standardised(tasks, reference=kola_reference)
    found = compare_views(views, paired=pairs.differences, standardised=scores, notes=pairs.notes)
    if page:
        write_comparison(found, page)
    return found


def _standardised(runs: Sequence[tuple[str, Tasks]], *, reference: Path | None) -> ScoreTable | None:
    if reference or any(metric.level for _, tasks in runs for metrics in tasks.values() for metric in metrics):
        from .kola_runs import kola_table  # numpy

        return kola_table(runs, reference=reference)
    return None


def watch(folder: Path, *, to: Sequence[str] = ()) -> RunWatch:
    """Follows the run in `folder`; `to` names trackers (`tensorboard=FOLDER`, `csv=FILE`) that receive its curves. A
    context manager."""
    return RunWatch(folder, to=to)


def report(folder: Path) -> Path:
    """Writes `report.html` of the run in `folder`."""
    return write_report(folder, change=change_since_earlier(folder))


class RunWatch:
    """Follows a run by polling its files; every event is read once.

    `to` names trackers, such as `tensorboard=FOLDER` or `csv=FILE`. They always hold the true curve of the run: every
    step once, and nothing that a restart or rollback undid. `with RunWatch(...)` makes them durable at the end.
    """

    def __init__(self, folder: Path, *, to: Sequence[str] = ()) -> None:
        check_run(folder)
        self.folder = folder
        self._held = lock_owner(folder) is not None
        self._curve = LiveCurve(folder)
        with contextlib.ExitStack() as opened:
            trackers = []
            for words in to:
                trackers.append(open_tracker(words, run=folder.resolve().name))
                opened.callback(trackers[-1].close)
            self._feed = Feed(self._curve, trackers)
            self._opened = opened.pop_all()

    @property
    def points(self) -> int:
        """Number of points of the curve."""
        return len(self._curve)

    def update(self) -> None:
        """Reads new events and updates the trackers."""
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: the run is gone")
        self._held = lock_owner(self.folder) is not None  # before its last events are read
        self._curve.update()
        self._feed.update()

    def over(self, *, waits: bool = False) -> bool:
        """Whether the run has ended; with `waits`, a stopped run has not, since it may continue."""
        return is_over(self._curve.stream, held=self._held, waits=waits)

    def looks(self, *, waits: bool = False, pause: Callable[[float], None] | None = None) -> Iterator[bool]:
        """Yields False while the run is alive and True when it is over, after reading all new events. Pauses for a
        second between polls, longer if the caller takes long to draw."""
        while not self.over(waits=waits):
            start = time.monotonic()
            yield False
            (pause or time.sleep)(max(LOOK_EVERY_S, (time.monotonic() - start) / SHARE))
            self.update()
        yield True

    def view(self) -> RunView:
        """The run as it stood at the last update."""
        return read_run(self.folder, stream=self._curve.stream)

    def __enter__(self) -> RunWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def newest_run(runs: Path) -> Path:
    """The most recently changed run in `runs`."""
    newest = newest_runs(runs, most=1)
    if not newest:
        raise DataError(f"{runs}: there is no run yet")
    return Path(newest[0].folder)


_SAVING = ("step", "interval_s", "steps", "bound", "blocked_s", "slowed_s", "persist_s", "mtbf_s", "failures")


def standing(view: RunView) -> tuple[dict[str, Any], list[str]]:
    """The status of a run, as values and as lines."""
    last = view.steps[-1] if view.steps else None
    value = {
        "run": str(view.folder),
        "name": view.name,
        "finished": view.finished,
        "process": view.process,
        "stages": {stage.name: {"state": stage.state, "seconds": stage.seconds} for stage in view.stages},
        "step": dataclasses.asdict(last) if last else None,
        "saved_step": view.saved_step,
        "save_interval": {name: view.saving[name] for name in _SAVING if name in view.saving} or None,
        "missing": list(view.missing),
    }
    return value, status_lines(view)
