"""What the ranks of a run decide together about its checkpoints. No torch: whoever trains brings the collectives.

Only few moments need it: a start, an end, the choice of an interval. Saving itself needs none, because ranks that write
in the background find each other by files (commit.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ropewalk.base.errors import DamagedCheckpoint, DataError, RopewalkError


class Coordinator(Protocol):
    """Collectives of all ranks of a run: all must call, in the same order."""

    def agree(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        ...

    def broadcast(self, value: Any) -> Any:
        """The `value` of rank 0, which JSON could hold; those of other ranks do not matter."""
        ...


class Alone:
    """One rank: it agrees with itself."""

    def agree(self, yes: bool) -> bool:
        return yes

    def barrier(self) -> None:
        """Nobody to wait for."""

    def broadcast(self, value: Any) -> Any:
        return value


def decided(coordinator: Coordinator, decide: Callable[[], Any], *, leads: bool) -> Any:
    """What rank 0, which `leads`, finds; an error of rank 0 is one of every rank. All ranks must call."""
    value, failure = None, None
    if leads:
        try:
            value = decide()
        except RopewalkError as error:
            failure = error
    damaged = isinstance(failure, DamagedCheckpoint)
    told = coordinator.broadcast({"value": value, "error": str(failure) if failure else "", "damaged": damaged})
    if failure:
        raise failure
    if told["error"]:
        raise (DamagedCheckpoint if told["damaged"] else DataError)(f"rank 0: {told['error']}")
    return told["value"]
