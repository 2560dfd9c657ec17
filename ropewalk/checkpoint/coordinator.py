"""Collective decisions of the ranks about checkpoints: at start, at the end, and on the save interval. No torch.

The training loop provides the collectives. Saving needs none: ranks that write in the background coordinate by files
(commit.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ropewalk.base.errors import DamagedCheckpoint, DataError, RopewalkError


class Coordinator(Protocol):
    """Collectives of all ranks of a run: all must call, in the same order."""

    def agree(self, yes: bool) -> bool:
        """Logical and over all ranks."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called."""
        ...

    def broadcast(self, value: Any) -> Any:
        """The `value` of rank 0, which must be JSON-serializable; values of other ranks are ignored."""
        ...


class Alone:
    """The coordinator of a single rank."""

    def agree(self, yes: bool) -> bool:
        return yes

    def barrier(self) -> None:
        """Returns at once."""

    def broadcast(self, value: Any) -> Any:
        return value


def decided(coordinator: Coordinator, decide: Callable[[], Any], *, leads: bool) -> Any:
    """The result of `decide` on rank 0, which `leads`; its error is raised on every rank. All ranks must call."""
    value, failure = None, None
    if leads:
        try:
            value = decide()
        except RopewalkError as error:
            failure = error
    damaged = isinstance(failure, DamagedCheckpoint)
    answer = coordinator.broadcast({"value": value, "error": str(failure) if failure else "", "damaged": damaged})
    if failure:
        raise failure
    if answer["error"]:
        raise (DamagedCheckpoint if answer["damaged"] else DataError)(f"rank 0: {answer['error']}")
    return answer["value"]
