"""Runs that are looked at while they go on."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError
from ropewalk.base.files import lock_owner
from ropewalk.monitor.follow import Feed, LiveCurve, is_over, open_tracker
from ropewalk.monitor.run_list import newest_runs
from ropewalk.monitor.run_text import status_lines
from ropewalk.monitor.run_view import RunView, check_run, read_run

LOOK_EVERY_S = 1.0
SHARE = 0.1
"""Of its time a watch works at most: a very large run is looked at less often."""


class RunWatch:
    """A run that is looked at again and again; what its files say is read once.

    `to` names trackers, as `tensorboard=FOLDER` or `csv=FILE`, which always hold the true curve of the run: nothing
    that a restart or a rollback undid, and every step once. `with Watch(...)` makes them durable at the end.
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
        """How many points the curve has."""
        return len(self._curve)

    def update(self) -> None:
        """Reads what was written since, and brings the trackers up to date."""
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: the run is gone")
        self._held = lock_owner(self.folder) is not None  # before its last events are read
        self._curve.update()
        self._feed.update()

    def over(self, *, waits: bool = False) -> bool:
        """Whether nobody works on the run any more; with `waits` one that was stopped is not over."""
        return is_over(self._curve.stream, held=self._held, waits=waits)

    def looks(self, *, waits: bool = False, pause: Callable[[float], None] | None = None) -> Iterator[bool]:
        """Whether the run is over, again and again until it is; each time all that was written is read. Between two
        times it pauses for a second, and longer where whoever asks takes long to draw."""
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
    """The run in `runs` that changed last."""
    newest = newest_runs(runs, most=1)
    if not newest:
        raise DataError(f"{runs}: there is no run yet")
    return Path(newest[0].folder)


_SAVING = ("step", "interval_s", "steps", "bound", "blocked_s", "slowed_s", "persist_s", "mtbf_s", "failures")


def standing(view: RunView) -> tuple[dict[str, Any], list[str]]:
    """Where a run stands: as values and as lines."""
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
