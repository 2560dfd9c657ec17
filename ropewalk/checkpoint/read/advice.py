"""What to do about a damaged checkpoint that somebody named. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from ropewalk.base.errors import DamagedCheckpoint, DataError

from ..format import list_checkpoints, read_checkpoint_manifest
from ..policy.prune import step_of


@contextlib.contextmanager
def advising(path: Path) -> Iterator[None]:
    """Whoever reads the checkpoint `path` in this block and finds it damaged is told what to do about it."""
    try:
        yield
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{error}; {instead_of(path)}") from None


def instead_of(path: Path, *, damaged: Collection[Path] = ()) -> str:
    """What to do about the damaged checkpoint `path`: which other one to use, and how its run makes it again.

    Of the others only the manifests are read, of those in `damaged` nothing.
    """
    path = path if path.name else path.resolve()
    others = [other for other in list_checkpoints(path.parent) if other.name != path.name]
    newest = all(other.name < path.name for other in others)
    use = next((other for other in reversed(others) if other not in damaged and _is_readable(other)), None)
    of_a_run, again = path.parent.name == "checkpoints", "away and give the run's command again, which then trains from"
    if not use:
        return "no other checkpoint is whole" + (f"; move {path.parent} {again} the beginning" if of_a_run else "")
    words = f"use {'an older' if newest else 'another'} checkpoint, {use}"
    return words + (f", or move {path} {again} step {step_of(use)}" if newest and of_a_run else "")


def _is_readable(path: Path) -> bool:
    try:
        read_checkpoint_manifest(path)
    except DataError:
        return False
    return True
