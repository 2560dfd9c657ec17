"""The loss of each row of a step, which every rank learns: what draws by importance go by.

Shapes: B rows, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..mesh import Mesh
from ..stage_work import Microbatch


class RowLosses:
    """Collects the losses of the rows of one step. Nothing waits for the device."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._heard: list[tuple[Tensor, Tensor, Tensor]] = []

    def begin(self) -> None:
        """A step begins, or begins again."""
        self._heard = []

    @torch.no_grad()
    def hear(self, piece: Microbatch, losses_N: Tensor) -> None:
        """Takes in the weighted losses of this rank's places of a microbatch."""
        weight = piece.batch.weight
        losses_B = losses_N.detach().view(weight.shape).sum(1, dtype=torch.float64)
        self._heard.append((piece.rows_B, losses_B, weight.sum(1, dtype=torch.float64)))

    @torch.no_grad()
    def finish(self, rows: int) -> Tensor:
        """The mean loss of each of the global batch's `rows` rows, NaN where nothing counts. All ranks must call."""
        sums = torch.zeros(2, rows, dtype=torch.float64, device=self._device)
        for numbers_B, losses_B, weights_B in self._heard:
            sums[:, numbers_B.to(self._device)] += torch.stack([losses_B, weights_B]).to(self._device)
        self._heard = []
        sums = self._mesh.tokens.all_reduce(sums)
        pipeline = self._mesh.group("pipeline")
        if pipeline.size > 1:
            sums = pipeline.broadcast(sums, source=pipeline.size - 1)
        return sums[0] / sums[1]
