"""The newest whole checkpoint of a folder, as one process finds it."""

from __future__ import annotations

from pathlib import Path

from ropewalk.checkpoint.coordinator import Alone
from ropewalk.checkpoint.read.load_latest import find_on_disk
from ropewalk.checkpoint.tensors import State


def load_newest(folder: Path) -> tuple[Path | None, State | None, list[str]]:
    """Its path, its state, and what was wrong with newer ones."""
    found = find_on_disk(folder, Alone(), leads=True)
    return found.path, found.state, found.wrong
