"""What a pipeline asks of a rank's stages, and the microbatches that it asks it for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropewalk.load.batch import Batch

if TYPE_CHECKING:
    from .rank_executor import RankExecutor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Rows that are computed together, and what this rank works on of them."""

    batch: Batch
    """This rank's places of each row."""
    documents: Tensor
    """Of the whole rows."""
    rows_B: Tensor
    """Numbers of the rows in the global batch."""

    def to(self, device: torch.device) -> Microbatch:
        """The microbatch on `device`."""
        return Microbatch(self.batch.to(device), self.documents.to(device), self.rows_B.to(device))


class StageWork:
    """What a pipeline asks of this rank's stages in one step; without `total` scores instead of losses. With `reduces`,
    gradients travel as soon as those of a stage are final."""

    def __init__(
        self, executor: RankExecutor, pieces: list[Microbatch], total: Tensor | None, *, reduces: bool = False
    ) -> None:
        self._executor, self._pieces, self._total = executor, pieces, total
        self._reduces = reduces and not executor._plan.exact

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        it, piece = self._executor, self._pieces[microbatch]
        model = it._stages[stage]
        hidden = it._forward(model, piece, piece.batch.tokens if x is None else x)
        if stage < it._plan.pipeline * it._plan.chunks - 1:
            return hidden
        if self._total is None:
            return it._scores_of(model, hidden, piece)
        return it._loss_of(model, hidden, piece) / self._total

    def like(self, microbatch: int) -> Tensor:
        it, tokens = self._executor, self._pieces[microbatch].batch.tokens
        rows, positions = tokens.shape
        # With sequence parallelism positions come first, and this rank has its part of them.
        shape = (positions // it._tensor.size, rows) if it._plan.sequence else (rows, positions)
        return torch.empty(*shape, it.spec.width, dtype=it._dtype, device=it.device)

    def begin_last_backward(self, stage: int) -> None:
        if self._reduces:
            self._executor._data.last_backward(self._executor._names_of[stage])

    def end_last_backward(self, stage: int) -> None:
        if self._reduces:
            self._executor._data.complete(self._executor._names_of[stage])
