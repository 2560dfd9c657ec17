"""Copies of checkpoints, wherever they are: how they are named and what is asked of a place that has some. No torch.

A *shard* is what one rank keeps of one step: a folder like a checkpoint, whose manifest holds that rank's files and
pieces alone. A whole checkpoint, on a disk or in an object store, is the only shard of a world of one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ropewalk.base.errors import DataError

from ..format import CheckpointManifest

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class ShardKey:
    """Whose shard it is, and of which step."""

    run: str
    step: int
    rank: int = 0
    world: int = 1
    attempt: str = "0"
    """Name of the launch that made it. Shards of one step fit together when it is the same."""

    def __post_init__(self) -> None:
        # Keys come over the network and become paths.
        for name in (self.run, self.attempt):
            plain_name(name)
        if not 0 <= self.rank < self.world or self.step < 0:
            raise DataError(f"step {self.step} of rank {self.rank} of {self.world}: no such shard")

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.rank} of {self.world}"


def plain_name(name: str) -> str:
    """`name`, when it is safe as one part of a path; DataError otherwise."""
    if not _NAME.fullmatch(name):
        raise DataError(f"`{name}` cannot name a copy; letters, digits, `_`, `.` and `-` can")
    return name


@dataclass(frozen=True, slots=True)
class CopyOffer:
    """A copy that a place says it has."""

    key: ShardKey
    manifest: CheckpointManifest
    where: str
    """How the place itself finds it."""


class CopySource(Protocol):
    """A place that has copies. What it cannot do is a StorageError; what it has and is damaged, a DataError."""

    @property
    def name(self) -> str:
        """In the words of a report: `own memory`, `peer 10.0.0.2:29400`."""
        ...

    @property
    def checks(self) -> bool:
        """Whether `fetch` checks every chunk as it comes; else whoever asks does."""
        ...

    def offers(self) -> tuple[list[CopyOffer], list[str]]:
        """Every copy of the run, and what is wrong with those whose manifests are damaged (out of sight now)."""
        ...

    def fetch(self, offer: CopyOffer, file: str, target: Path, chunks: Sequence[int]) -> None:
        """Makes `target` the file, or a link to it; of a file that must travel, only `chunks` need be there."""
        ...

    def quarantine(self, offer: CopyOffer) -> None:
        """Takes a copy that was found damaged out of sight."""
        ...
