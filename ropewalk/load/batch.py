"""What a step reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of tokens with everything a loss may need; every tensor is B T."""

    tokens: Tensor
    """int64 inputs."""
    targets: Tensor
    """int64, the token after each input."""
    weight: Tensor
    """float32, how much each target counts: a loss mask, an importance. The loss is the weighted mean."""
    positions: Tensor
    """int64, the position that the model is told."""
    documents: Tensor
    """int32, numbers the documents of a row: equal numbers, same document."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Batch:
        """A copy on `device`; asynchronous from pinned memory."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self._tensors()))

    def pinned(self) -> Batch:
        """A copy in page-locked memory, from which a GPU copies while the host goes on."""
        return Batch(*(tensor.contiguous().pin_memory() for tensor in self._tensors()))

    def split(self, rows: int) -> list[Batch]:
        """Microbatches of `rows` rows."""
        pieces = zip(*(tensor.split(rows) for tensor in self._tensors()), strict=True)
        return [Batch(*piece) for piece in pieces]

    def cut(self, length: int) -> Batch:
        """The same tokens in rows of `length`, each with positions of its own; `length` divides the rows'."""
        if length == self.tokens.shape[1]:
            return self
        tokens, targets, weight, positions, documents = (t.reshape(-1, length) for t in self._tensors())
        return Batch(tokens, targets, weight, positions - positions[:, :1], documents)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.tokens, self.targets, self.weight, self.positions, self.documents
