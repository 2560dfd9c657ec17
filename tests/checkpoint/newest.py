"""The newest whole checkpoint, found and loaded by the seam that the loop uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ropewalk.checkpoint.coordinator import Alone
from ropewalk.checkpoint.read.load import Check, Fill
from ropewalk.checkpoint.read.load_latest import Candidates, DiskCheckpoints, Search
from ropewalk.checkpoint.run_state import State
from ropewalk.parallel.placement import Choose
from ropewalk.train.checkpointer import Checkpointer


def load_newest(folder: Path) -> tuple[Path | None, State | None, list[str]]:
    """Its path, its state, and what was wrong with newer ones."""
    search = searched(DiskCheckpoints(folder))
    state = search.state
    return folder / f"step-{state.step:08d}" if state else None, state, search.wrong


def searched(candidates: Candidates, *, fill: Fill | None = None) -> Search:
    """A search of one process that has ended."""
    search = Search(candidates, Alone(), leads=True)
    while search.find() and not search.load(fill=fill):
        pass
    return search


def continued(
    checkpointer: Checkpointer,
    *,
    wants: Callable[[State], Choose | None] = lambda _: None,
    fill: Fill | None = None,
    check: Check = lambda *_: None,
) -> State | None:
    """The state that a run with `checkpointer` continues from, durable. All ranks must call."""
    with checkpointer.search(check=check) as search:
        while (head := search.find()) and not search.load(wants(head), fill):
            pass
    if search.state and fill is None:
        checkpointer.make_durable(search.state)
    return search.state
