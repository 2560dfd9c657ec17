"""Finds the checkpoint that a run continues from: rank 0 chooses one, and either every rank loads it or none does.

while head := search.find():
    ...  # build what `head` describes
    if search.load(choose, fill):
        break
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from ropewalk.base.errors import DamagedCheckpoint
from ropewalk.parallel.placement import Choose

from ..coordinator import Alone, Coordinator, decided
from ..format import list_checkpoints, read_checkpoint_manifest
from ..run_state import State, head_of
from ..tiers.tier import CopySource
from .load import Check, Fill, load_or_fill
from .tiered_load import RestoreReport, TierCandidates

T = TypeVar("T")


class Candidates(Protocol):
    """Checkpoints of a run by name, as one rank sees them."""

    @property
    def wrong(self) -> list[str]:
        """Errors of the candidates that were tried."""
        ...

    def newest(self, refused: Collection[str]) -> str:
        """The newest that no rank has refused; empty if the run has none. DamagedCheckpoint when all are refused:
        training from scratch would silently discard a run."""
        ...

    def head(self, name: str) -> State | None:
        """Its state without tensors, from the manifest; None when this rank cannot read or use it."""
        ...

    def load(self, name: str, choose: Choose | None, fill: Fill | None) -> State | None:
        """Its state, as of `load_or_fill`; None when this rank's shard is damaged."""
        ...

    def refuse(self, name: str) -> None:
        """Called when some rank cannot use it."""
        ...


class Search:
    """Tries candidates, newest first, until every rank has loaded its shard of one."""

    def __init__(self, candidates: Candidates, coordinator: Coordinator, *, leads: bool) -> None:
        self._candidates, self._coordinator, self._leads = candidates, coordinator, leads
        self._refused: list[str] = []
        self._name = ""
        self.state: State | None = None
        """What `load` returned; None until it succeeds."""

    @property
    def wrong(self) -> list[str]:
        """Errors of checkpoints newer than the one found."""
        return self._candidates.wrong

    def find(self) -> State | None:
        """The newest candidate without tensors, from its manifest; None if the run has none. The same on every rank;
        all
        ranks must call."""
        while name := self._newest():
            self._name = name
            head = self._candidates.head(name)
            if self._coordinator.agree(head is not None) and head:
                return head
            self._refuse()
        return None

    def load(self, choose: Choose | None = None, fill: Fill | None = None) -> State | None:
        """The state of the last candidate found; this rank reads what it chooses (None: all). `fill` receives the
        tensors
        as they are read, and again those of an older candidate if some are damaged. None when some rank cannot read its
        shard: `find` then returns an older candidate. All ranks must call."""
        state = self._candidates.load(self._name, choose, fill)
        if self._coordinator.agree(state is not None):
            self.state = state
            return state
        self._refuse()
        return None

    def _newest(self) -> str:
        try:
            newest = decided(self._coordinator, lambda: self._candidates.newest(self._refused), leads=self._leads)
        except DamagedCheckpoint as error:
            mine = [line for line in self._candidates.wrong if line not in str(error)]
            raise DamagedCheckpoint("\n".join([*mine, str(error)])) from error
        return str(newest)

    def _refuse(self) -> None:
        self._refused.append(self._name)
        self._candidates.refuse(self._name)


class DiskCheckpoints:
    """The checkpoints of a folder that all ranks share."""

    def __init__(self, folder: Path, *, check: Check = lambda *_: None) -> None:
        self._folder, self._check = folder, check
        self.wrong: list[str] = []
        self._unreadable: list[str] = []
        """Names that only rank 0 tried."""
        self._problem = ""

    def newest(self, refused: Collection[str]) -> str:
        for path in reversed(list_checkpoints(self._folder)):
            if path.name in refused or path.name in self._unreadable:
                continue
            if self.head(path.name):
                return path.name
            self._unreadable.append(path.name)
            self.wrong.append(self._problem)
        if self.wrong:
            end = (
                f"{self._folder}: no checkpoint is whole, and nothing is deleted; restore one from a backup, or move "
                "this folder away and run the same command again to train from the beginning"
            )
            raise DamagedCheckpoint("\n".join([*self.wrong, end]))
        return ""

    def head(self, name: str) -> State | None:
        head, self._problem = _readable(lambda: self._head(name))
        return head

    def load(self, name: str, choose: Choose | None, fill: Fill | None) -> State | None:
        state, self._problem = _readable(lambda: load_or_fill(self._folder / name, choose, fill))
        return state

    def refuse(self, name: str) -> None:
        other = f"{self._folder / name}: another rank cannot read its shard; do all ranks see the same folder?"
        self.wrong.append(self._problem or other)

    def _head(self, name: str) -> State:
        manifest = read_checkpoint_manifest(self._folder / name)
        self._check(manifest, self._folder / name)
        return head_of(manifest)


def restore(
    sources: Sequence[CopySource], *, scratch: Path, choose: Choose | None = None
) -> tuple[State | None, RestoreReport]:
    """The newest state in `sources`, on a single rank; None if they have none."""
    with contextlib.closing(TierCandidates(sources, scratch=scratch)) as candidates:
        search = Search(candidates, Alone(), leads=True)
        while search.find() and not search.load(choose):
            pass
    return search.state, candidates.report


def _readable(read: Callable[[], T]) -> tuple[T | None, str]:
    """The result of `read`, or the error of a damaged checkpoint. Any other error is not about checkpoints and ends the
    search."""
    try:
        return read(), ""
    except DamagedCheckpoint as error:
        return None, str(error)
