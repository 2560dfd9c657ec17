"""Copies of checkpoints in any tier: names, and the interface of a source of copies. No torch.

A *shard* is the copy of one rank at one step: a folder like a checkpoint, whose manifest has only the files and pieces
of this rank. A whole checkpoint, on disk or in an object store, is the only shard of a world of one.
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
    """Identifies a shard."""

    run: str
    step: int
    rank: int = 0
    world: int = 1
    attempt: str = "0"
    """Name of the launch. Shards of a step belong together if their attempts are equal."""

    def __post_init__(self) -> None:
        # Keys are received over the network and become paths.
        for name in (self.run, self.attempt):
            plain_name(name)
        if not 0 <= self.rank < self.world or self.step < 0:
            raise DataError(f"step {self.step} of rank {self.rank} of {self.world}: no such shard")

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.rank} of {self.world}"


def plain_name(name: str) -> str:
    """`name` if it is safe as a path component; DataError otherwise."""
    if not _NAME.fullmatch(name):
        raise DataError(f"`{name}` is not a valid name of a copy; use letters, digits, `_`, `.` and `-`")
    return name


@dataclass(frozen=True, slots=True)
class CopyOffer:
    """A copy as announced by its source."""

    key: ShardKey
    manifest: CheckpointManifest
    where: str
    """Its location within the source."""


class CopySource(Protocol):
    """A source of copies. Failures raise StorageError, damaged copies DataError."""

    @property
    def name(self) -> str:
        """For reports: `own memory`, `peer 10.0.0.2:29400`."""
        ...

    @property
    def checks(self) -> bool:
        """Whether `fetch` verifies every chunk; otherwise the caller does."""
        ...

    def offers(self) -> tuple[list[CopyOffer], list[str]]:
        """All copies of the run, and the errors of those with damaged manifests, which are quarantined."""
        ...

    def fetch(self, offer: CopyOffer, file: str, target: Path, chunks: Sequence[int]) -> None:
        """Creates `target` as a link to the file, or as a copy with at least `chunks`."""
        ...

    def quarantine(self, offer: CopyOffer) -> None:
        """Removes a damaged copy from `offers`."""
        ...
