"""What a step reads, and the compact form in which it travels to the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gather import RowForm, expand


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

    @staticmethod
    def of_rows(rows: Tensor, *, weight: Tensor | None = None) -> Batch:
        """Rows of T + 1 tokens, each of one document from its beginning; all targets count alike, or as `weight`
        says."""
        tokens = rows[:, :-1]
        return Batch(
            tokens=tokens,
            targets=rows[:, 1:],
            weight=torch.ones(tokens.shape, device=rows.device) if weight is None else weight,
            positions=torch.arange(tokens.shape[1], device=rows.device).expand_as(tokens),
            documents=torch.zeros(tokens.shape, dtype=torch.int32, device=rows.device),
        )

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`: itself when it is there, else a copy."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self._tensors()))

    def lent_to(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory until `stream`, which did not make it, has worked with it."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def pinned(self) -> Batch:
        """A copy in page-locked memory, from which a GPU copies while the host goes on."""
        return Batch(*(tensor.contiguous().pin_memory() for tensor in self._tensors()))

    def split(self, rows: int) -> list[Batch]:
        """Microbatches of `rows` rows."""
        pieces = zip(*(tensor.split(rows) for tensor in self._tensors()), strict=True)
        return [Batch(*piece) for piece in pieces]

    def strided(self, first: int, every: int) -> Batch:
        """Rows `first`, `first` + `every`, ..."""
        return self if every == 1 else Batch(*(tensor[first::every] for tensor in self._tensors()))

    def rows(self, numbers: Tensor) -> Batch:
        """The rows of these numbers."""
        return Batch(*(tensor[numbers] for tensor in self._tensors()))

    def at(self, places: Tensor) -> Batch:
        """These places of every row."""
        return Batch(*(tensor.index_select(1, places) for tensor in self._tensors()))

    def cut(self, length: int) -> Batch:
        """The same tokens in rows of `length`, each with positions of its own; `length` divides the rows'."""
        if length == self.tokens.shape[1]:
            return self
        tokens, targets, weight, positions, documents = (t.reshape(-1, length) for t in self._tensors())
        # What goes on from the row before counts from its own beginning; what begins later in the row already does.
        first, place = positions[:, :1], torch.arange(length, device=positions.device)
        positions = torch.where(positions == first + place, place, positions)
        return Batch(tokens, targets, weight, positions, documents)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.tokens, self.targets, self.weight, self.positions, self.documents


@dataclass(frozen=True, slots=True)
class Compact:
    """Rows as they travel: 2 or 4 bytes a token and two bits, where a `Batch` takes 32. One copy brings them over; what
    a step needs is made from them on its device."""

    rows: Tensor
    """uint8, a row of memory for each row, as `form` says; page-locked for a GPU."""
    form: RowForm
    restarts: bool
    """Whether positions begin anew with each document of a row."""
    filled: int
    """Tokens that are not padding."""
    row_weights: Tensor | None = None
    """float32, how much the targets of each row count; None: all alike."""

    def __len__(self) -> int:
        return self.rows.shape[0]

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`. Does not wait: a copy from page-locked memory goes on while the host does, and torch
        gives that memory out again only when the copy is over."""
        if device.type == "cpu":
            return self._weighted(self._expanded_here())
        return self._weighted(self.expanded(self.rows.to(device, non_blocking=True)))

    def expanded(self, rows: Tensor) -> Batch:
        """The batch made of `rows`, a copy of these rows, on the device where they are; by operations of torch."""
        length, begin, size = self.form.length, self.form.token_bytes, self.form.bit_bytes
        # Through signed types: torch knows few operations on unsigned ones.
        narrow, mask = (torch.int16, 0xFFFF) if self.form.dtype == "uint16" else (torch.int32, 0xFFFFFFFF)
        tokens = rows[:, :begin].view(narrow).to(torch.int64).bitwise_and_(mask)
        starts = _unpacked(rows[:, begin : begin + size])[:, :length]
        counts = _unpacked(rows[:, begin + size : begin + 2 * size])[:, :length]
        place = torch.arange(length, device=rows.device)
        positions = place.expand(len(rows), -1)
        if self.restarts:
            positions = place - torch.where(starts.bool(), place, 0).cummax(1).values
        return Batch(
            tokens=tokens[:, :-1],
            targets=tokens[:, 1:],
            weight=counts.float(),
            positions=positions,
            documents=starts.cumsum(1, dtype=torch.int32) - 1,
        )

    def _weighted(self, batch: Batch) -> Batch:
        if self.row_weights is not None:
            batch.weight.mul_(self.row_weights.to(batch.weight.device, non_blocking=True).unsqueeze(1))
        return batch

    def _expanded_here(self) -> Batch:
        """The same by a kernel: a fifth of the time of torch's operations on one core."""
        made = expand(self.rows.numpy(), self.form, positions=self.restarts)
        tokens = torch.from_numpy(made.tokens)
        place = torch.arange(self.form.length).expand(len(self), -1)
        return Batch(
            tokens=tokens[:, :-1],
            targets=tokens[:, 1:],
            weight=torch.from_numpy(made.counts),
            positions=torch.from_numpy(made.positions) if self.restarts else place,
            documents=torch.from_numpy(made.documents),
        )


class Courier:
    """Brings rows to a device. On a GPU by a stream of its own: beside the kernels of the step before, and without
    waiting until their queue, which holds about a thousand, has room for more."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def bring(self, compact: Compact) -> Batch:
        """The batch, for the current stream."""
        if self._stream is None:
            return compact.to(self._device)
        with torch.cuda.stream(self._stream):
            batch = compact.to(self._device)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        batch.lent_to(current)
        return batch


def _unpacked(bits: Tensor) -> Tensor:
    """A byte for each bit, the lowest bit of a byte first."""
    shifts = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits.unsqueeze(-1) >> shifts).bitwise_and_(1).flatten(1)
