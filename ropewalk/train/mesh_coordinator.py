"""Collectives between the hosts of a run; none waits for a GPU."""

from __future__ import annotations

from typing import Any

import torch

from ropewalk.parallel.comm import Group


class MeshCoordinator:
    """The `Coordinator` of checkpoints (checkpoint/coordinator.py), over one group of all ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def agree(self, yes: bool) -> bool:
        return bool(self._group.all_reduce(torch.tensor([int(yes)]), operation="min").item())

    def barrier(self) -> None:
        self.agree(True)

    def broadcast(self, value: Any) -> Any:
        return self._group.broadcast_json(value)
