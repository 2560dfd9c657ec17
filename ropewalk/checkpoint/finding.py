"""Which state the ranks of a run go on from: rank 0 finds one, every rank reads the same, or none does."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.base.errors import DataError

from .copier import Copier
from .format import read_checkpoint_manifest
from .restore import Report
from .tensors import State, Wants, head_of, load, load_newest, whole
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


def find_on_disk(folder: Path, together: Together, *, leads: bool, wants: Wants = whole) -> Found:
    """The newest checkpoint, of a folder that all ranks see, of which every rank can read what it `wants`. All ranks
    must call."""
    refused: list[str] = []
    wrong: list[str] = []
    while True:
        found = Found()
        try:
            name = decided(together, functools.partial(_newest, folder, found, refused, wants), leads=leads)
        except DataError as error:
            raise DataError("\n".join([*wrong, str(error)])) from error
        if not name:
            return found
        if not leads:
            found.path = folder / name
            try:
                found.state = load(found.path, choose=wants(head_of(read_checkpoint_manifest(found.path))))
            except DataError as error:
                wrong.append(str(error))
            found.wrong = wrong
        if together.agree(found.state is not None):
            return found
        refused.append(name)


def find_anywhere(copier: Copier, together: Together, *, leads: bool, wants: Wants = whole) -> Found:
    """The newest state of all places of which every rank can put together what it `wants`. All ranks must call."""
    refused: list[str] = []
    while True:
        found = Found()
        proposed = decided(together, functools.partial(_propose, copier, found, refused, wants), leads=leads)
        if not proposed:
            return found
        if not leads:
            _follow(copier, found, proposed, wants)
        if together.agree(found.state is not None):
            return found
        refused.append(proposed)


def _newest(folder: Path, found: Found, refused: list[str], wants: Wants) -> str:
    """The name of the newest on the disk that no rank has refused."""
    found.path, found.state, found.wrong = load_newest(folder, wants=wants, refused=refused)
    return found.path.name if found.path else ""


def _propose(copier: Copier, found: Found, refused: list[str], wants: Wants) -> str:
    """The identity of the newest that no rank has refused."""
    found.state, found.report = copier.restore(accepts=lambda name: name not in refused, wants=wants)
    found.wrong = found.report.damaged
    return found.report.identity


def _follow(copier: Copier, found: Found, proposed: str, wants: Wants) -> None:
    """The state that rank 0 proposed, where this rank can put it together."""
    try:
        found.state, found.report = copier.restore(accepts=lambda name: name == proposed, wants=wants)
    except DataError as error:
        found.wrong = [str(error)]
