"""Which state the ranks of a run go on from: rank 0 finds one, every rank reads the same, or none does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ropewalk.base.errors import DamagedCheckpoint

from ..coordinator import Coordinator, decided
from ..format import CheckpointManifest, list_checkpoints, read_checkpoint_manifest
from ..tensors import Fill, State, Wants, head_of, take, whole
from ..tiers.tier_writer import TierWriter
from .tiered_load import Report

T = TypeVar("T")


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


Check = Callable[[CheckpointManifest, Path], object]
"""Raises DamagedCheckpoint when a manifest is not of a checkpoint that can be used."""


def find_on_disk(
    folder: Path,
    coordinator: Coordinator,
    *,
    leads: bool,
    wants: Wants = whole,
    fill: Fill | None = None,
    check: Check = lambda *_: None,
) -> Found:
    """The newest checkpoint, of a folder that all ranks see, of which every rank can read what it `wants`. With `fill`
    its tensors are given to that as they are read, and to that of an older one when they turn out to be damaged. What
    `check` refuses is damaged too.

    All ranks must call; they are all asked what they want, and fill, at the same time."""
    refused: list[str] = []
    wrong: list[str] = []
    while True:
        try:
            name = decided(coordinator, functools.partial(_newest, folder, refused, wrong, check), leads=leads)
        except DamagedCheckpoint as error:
            mine = [line for line in wrong if line not in str(error)]
            raise DamagedCheckpoint("\n".join([*mine, str(error)])) from error
        if not name:
            return Found(wrong=wrong)
        path, state = folder / name, None
        head, problem = _readable(functools.partial(_head, path, check))
        if coordinator.agree(head is not None) and head:
            choose = wants(head)
            state, problem = _readable(functools.partial(take, path, choose, fill))
            if coordinator.agree(state is not None):
                return Found(path=path, state=state, wrong=wrong)
        refused.append(name)
        wrong.append(problem or f"{path}: another rank cannot read its part; do all ranks see the same folder?")


def find_anywhere(
    tier_writer: TierWriter,
    coordinator: Coordinator,
    *,
    leads: bool,
    wants: Wants = whole,
    fill: Fill | None = None,
    check: Check = lambda *_: None,
) -> Found:
    """The newest state of all places of which every rank can put together what it `wants`; `fill` and `check` as above.
    All ranks must call."""
    refused: list[str] = []
    with tier_writer.offered() as offered:
        found = Found(report=offered.report)
        while True:
            name = decided(coordinator, functools.partial(offered.newest, refused), leads=leads)
            if not name:
                break
            head = offered.head(name, check)
            if coordinator.agree(head is not None) and head:
                found.state = offered.load(name, wants(head), fill)
                if coordinator.agree(found.state is not None):
                    break
            found.state = None
            refused.append(name)
    found.wrong = found.report.damaged if found.report else []
    return found


def _newest(folder: Path, refused: list[str], wrong: list[str], check: Check) -> str:
    """The name of the newest on the disk that no rank has refused, empty when there is none yet; DamagedCheckpoint when
    all are refused."""
    for path in reversed(list_checkpoints(folder)):
        if path.name in refused:
            continue
        head, problem = _readable(functools.partial(_head, path, check))
        if head:
            return path.name
        refused.append(path.name)
        wrong.append(problem)
    if wrong:
        end = (
            f"{folder}: no checkpoint is whole, and nothing is deleted; restore one from a backup, or move this folder "
            "away and give the same command again to train from the beginning"
        )
        raise DamagedCheckpoint("\n".join([*wrong, end]))  # from scratch would silently throw away a run
    return ""


def _head(path: Path, check: Check) -> State:
    manifest = read_checkpoint_manifest(path)
    check(manifest, path)
    return head_of(manifest)


def _readable(read: Callable[[], T]) -> tuple[T | None, str]:
    """What `read` gives, or what is wrong with the checkpoint. Any other error, such as that of a damaged shard that
    `read` opens on the way, says nothing about checkpoints and ends the search."""
    try:
        return read(), ""
    except DamagedCheckpoint as error:
        return None, str(error)
