"""Every kind of tracker, by its name on the command line."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path

from ropewalk.base.errors import UserError

from ..follow import Tracker

KINDS = {
    "csv": "ropewalk.monitor.trackers.csv_file:Table",
    "tensorboard": "ropewalk.monitor.trackers.tensorboard:EventFile",
}
"""What opens a tracker for a place and the name of a run."""


def open_tracker(words: str, *, run: str) -> Tracker:
    """The tracker that `KIND=PLACE` names, for the run of this name."""
    kind, _, place = words.partition("=")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(KINDS)}"
        raise UserError(f"--to {words}: no tracker `{kind}`; {hint}")
    if not place:
        raise UserError(f"--to {words}: says not where; write --to {kind}=PATH")
    module, _, name = KINDS[kind].partition(":")
    opener: Callable[[Path, str], Tracker] = getattr(importlib.import_module(module), name)
    return opener(Path(place), run)
