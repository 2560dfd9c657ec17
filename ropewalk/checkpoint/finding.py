"""Which state the ranks of a run go on from: rank 0 finds one, every rank reads the same, or none does."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.base.errors import DataError, RopewalkError

from .copier import Copier
from .restore import Report
from .tensors import State, load, load_newest
from .together import Together, decided


@dataclass(kw_only=True, slots=True)
class Found:
    """A state and where it was."""

    path: Path | None = None
    """Its checkpoint on the disk; None when it lies elsewhere, or there is none."""
    state: State | None = None
    """None when there is none yet."""
    wrong: list[str] = field(default_factory=list)
    """What was wrong with newer ones."""
    report: Report | None = None
    """How it was gathered from several places."""


def find_on_disk(folder: Path, together: Together, *, leads: bool) -> Found:
    """The newest whole checkpoint of a folder that all ranks see. All ranks must call."""
    found = Found()

    def look() -> str:
        found.path, found.state, found.wrong = load_newest(folder)
        return found.path.name if found.path else ""

    name = decided(together, look, leads=leads)
    if not name:
        return found
    failure = None
    if not leads:
        found.path = folder / name
        try:
            found.state = load(found.path)
        except RopewalkError as error:
            failure = error
    if not together.agree(failure is None):
        raise failure or DataError(f"{found.path}: another rank cannot read it; do all ranks see the same folder?")
    return found


def find_anywhere(copier: Copier, together: Together, *, leads: bool) -> Found:
    """The newest state of all places that every rank can put together. All ranks must call."""
    refused: list[str] = []
    while True:
        found = Found()
        proposed = decided(together, functools.partial(_propose, copier, found, refused), leads=leads)
        if not proposed:
            return found
        if not leads:
            _follow(copier, found, proposed)
        if together.agree(found.state is not None):
            return found
        refused.append(proposed)


def _propose(copier: Copier, found: Found, refused: list[str]) -> str:
    """The identity of the newest that no rank has refused."""
    found.state, found.report = copier.restore(accepts=lambda name: name not in refused)
    found.wrong = found.report.damaged
    return found.report.identity


def _follow(copier: Copier, found: Found, proposed: str) -> None:
    """The state that rank 0 proposed, where this rank can put it together."""
    try:
        found.state, found.report = copier.restore(accepts=lambda name: name == proposed)
    except DataError as error:
        found.wrong = [str(error)]
