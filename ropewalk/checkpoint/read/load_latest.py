"""Finds the checkpoint that a run continues from: rank 0 chooses one, every rank loads the same, or none does.

while head := search.find():
    ...  # open what `head` is of
    if search.load(choose, fill):
        break
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol, TypeVar

from ropewalk.base.errors import DamagedCheckpoint
from ropewalk.parallel.placement import Choose

from ..coordinator import Coordinator, decided
from ..format import list_checkpoints, read_checkpoint_manifest
from ..run_state import State, head_of
from .load import Fill, take
from .tiered_load import Check

T = TypeVar("T")


class Candidates(Protocol):
    """Checkpoints of a run by name, as one rank sees them."""

    @property
    def wrong(self) -> list[str]:
        """What was wrong with those that were tried."""
        ...

    def newest(self, refused: Collection[str]) -> str:
        """The newest that no rank has refused; empty when there is none yet. DamagedCheckpoint when all are refused:
        training from scratch would silently discard a run."""
        ...

    def head(self, name: str) -> State | None:
        """What its manifest says; None when this rank cannot read or use it."""
        ...

    def load(self, name: str, choose: Choose | None, fill: Fill | None) -> State | None:
        """Its state, as `tensors.take` gives it; None when this rank's part is damaged."""
        ...

    def refuse(self, name: str) -> None:
        """Some rank cannot use it."""
        ...


class Search:
    """Goes through the candidates, newest first, until every rank can load its part of one."""

    def __init__(self, candidates: Candidates, coordinator: Coordinator, *, leads: bool) -> None:
        self._candidates, self._coordinator, self._leads = candidates, coordinator, leads
        self._refused: list[str] = []
        self._name = ""
        self.state: State | None = None
        """What `load` returned; None until it succeeds."""

    @property
    def wrong(self) -> list[str]:
        """What was wrong with newer checkpoints than the one found."""
        return self._candidates.wrong

    def find(self) -> State | None:
        """The newest candidate as its manifest describes it, without tensors; None when there is none yet. The same on
        every rank; all ranks must call."""
        while name := self._newest():
            self._name = name
            head = self._candidates.head(name)
            if self._coordinator.agree(head is not None) and head:
                return head
            self._refuse()
        return None

    def load(self, choose: Choose | None = None, fill: Fill | None = None) -> State | None:
        """The state of the candidate found last, of which this rank reads what it chooses (None: all). With `fill` its
        tensors are given to that as they are read, and to that of an older one when they turn out to be damaged. None
        when some rank cannot read its part: `find` then gives an older one. All ranks must call."""
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
    """The checkpoints of a folder that all ranks see."""

    def __init__(self, folder: Path, *, check: Check = lambda *_: None) -> None:
        self._folder, self._check = folder, check
        self.wrong: list[str] = []
        self._unreadable: list[str] = []
        """Names that only rank 0 has tried."""
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
                "this folder away and give the same command again to train from the beginning"
            )
            raise DamagedCheckpoint("\n".join([*self.wrong, end]))
        return ""

    def head(self, name: str) -> State | None:
        head, self._problem = _readable(lambda: self._head(name))
        return head

    def load(self, name: str, choose: Choose | None, fill: Fill | None) -> State | None:
        state, self._problem = _readable(lambda: take(self._folder / name, choose, fill))
        return state

    def refuse(self, name: str) -> None:
        other = f"{self._folder / name}: another rank cannot read its part; do all ranks see the same folder?"
        self.wrong.append(self._problem or other)

    def _head(self, name: str) -> State:
        manifest = read_checkpoint_manifest(self._folder / name)
        self._check(manifest, self._folder / name)
        return head_of(manifest)


def _readable(read: Callable[[], T]) -> tuple[T | None, str]:
    """What `read` gives, or what is wrong with the checkpoint. Any other error, such as that of a damaged shard that
    `read` opens on the way, says nothing about checkpoints and ends the search."""
    try:
        return read(), ""
    except DamagedCheckpoint as error:
        return None, str(error)
