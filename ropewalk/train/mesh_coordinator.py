"""What the ranks of a run decide together, host to host: nothing here waits for a GPU."""

from __future__ import annotations

from typing import Any

import torch

from ropewalk.parallel.comm import Group, Pending


class MeshCoordinator:
    """The collectives that checkpoints need (checkpoint/coordinator.py), over one group of all ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def agree(self, yes: bool) -> bool:
        return bool(self._group.all_reduce(torch.tensor([int(yes)]), operation="min").item())

    def barrier(self) -> None:
        self.agree(True)

    def broadcast(self, value: Any) -> Any:
        return self._group.broadcast_json(value)


class StopFlag:
    """What any rank wishes reaches all of them, one step later and at the same step: a signal comes to one of them, and
    a rank that stopped by itself would leave the others waiting."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._under_way: Pending | None = None

    def exchange(self, wish: bool) -> bool:
        """Tells the others of `wish`; whether some rank had one at the last call. All ranks must call, every step."""
        if self._group.size == 1:
            return wish
        heard = bool(self._under_way.wait().item()) if self._under_way else False
        self._under_way = self._group.start_all_reduce(torch.tensor([int(wish)]), operation="max")
        return heard

    def finish(self) -> None:
        """Nothing is left under way."""
        if self._under_way:
            self._under_way.wait()
            self._under_way = None
