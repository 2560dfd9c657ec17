"""Which part of a tensor a rank holds, and how ranks gather the whole.

A tensor may be split by several axes: by those that the model declares, then by the shard axis along dimension 0 of
what they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm import Group


@dataclass(frozen=True, slots=True)
class Shard:
    """One dimension split over the ranks of a group."""

    dim: int
    sizes: tuple[int, ...]
    """How much each rank gets, in order; 0 where there is nothing left."""
    group: Group

    @property
    def begin(self) -> int:
        return sum(self.sizes[: self.group.rank])

    @property
    def size(self) -> int:
        return self.sizes[self.group.rank]


@dataclass(frozen=True, slots=True)
class Placement:
    """This rank's part of a tensor of `shape`."""

    shape: tuple[int, ...]
    """Of the whole."""
    shards: tuple[Shard, ...] = ()
    """In order: each splits what the ones before left."""
    first: bool = True
    """Whether this rank is the first of those that hold the same part."""

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the part begins in the whole."""
        corner = [0] * len(self.shape)
        for shard in self.shards:
            corner[shard.dim] += shard.begin
        return tuple(corner)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the part."""
        sides = list(self.shape)
        for shard in self.shards:
            sides[shard.dim] = shard.size
        return tuple(sides)

    @property
    def is_whole(self) -> bool:
        return not self.shards

    def further(self, dim: int, sizes: Sequence[int], group: Group, *, first: bool | None = None) -> Placement:
        """The part of this part that `group` leaves to this rank."""
        if group.size == 1:
            return Placement(self.shape, self.shards, self.first if first is None else first)
        shard = Shard(dim, tuple(sizes), group)
        return Placement(self.shape, (*self.shards, shard), self.first if first is None else first)

    def take(self, full: Tensor | LocalShard) -> Tensor:
        """This rank's part of the whole tensor, a view; of one that was read in parts, the part."""
        if isinstance(full, LocalShard):
            there = full.placement.shape, full.placement.offset, full.placement.local_shape
            assert there == (self.shape, self.offset, self.local_shape), f"the part {there} is another one"
            return full.local
        assert tuple(full.shape) == self.shape, f"{tuple(full.shape)} is not {self.shape}"
        for shard in self.shards:
            full = full.narrow(shard.dim, shard.begin, shard.size)
        return full

    def gather(self, part: Tensor) -> Tensor:
        """The whole of a tensor that is split like this one; all ranks of its groups must call. `part` may have more
        dimensions in front, which are not split."""
        extra = part.dim() - len(self.shape)
        for shard in reversed(self.shards):
            part = _joined(part, shard, extra + shard.dim)
        return part

    def sum(self, partial: Tensor, dim: int) -> Tensor:
        """`partial` sums over this rank's part of dimension `dim`, added up over all ranks that share it."""
        for shard in reversed(self.shards):
            if shard.dim == dim:
                partial = shard.group.all_reduce(partial.contiguous())
        return partial


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What a rank holds of a tensor: the values, and which part they are."""

    local: Tensor
    placement: Placement


Choose = Callable[[str, str, tuple[int, ...]], Placement | None]
"""By group (`model`, `optimizer`), name and shape of a whole tensor, the part of it that is needed; None: nothing."""


def whole_placement(shape: Sequence[int], *, first: bool = True) -> Placement:
    """The placement of a tensor that every rank holds whole."""
    return Placement(tuple(shape), (), first)


def chunk_sizes(side: int, ranks: int) -> tuple[int, ...]:
    """Parts of ceil(side / ranks), the last ones shorter or empty: as `torch.chunk` and FSDP split."""
    part = -(-side // ranks)
    return tuple(max(0, min(part, side - rank * part)) for rank in range(ranks))


def _joined(part: Tensor, shard: Shard, dim: int) -> Tensor:
    """The parts of all ranks of a shard along `dim`. Shorter ones are sent padded."""
    longest = max(shard.sizes)
    if part.shape[dim] < longest:
        missing = list(part.shape)
        missing[dim] = longest - part.shape[dim]
        part = torch.cat([part, part.new_zeros(missing)], dim)
    parts = shard.group.start_all_gather(part).wait().unbind(0)
    return torch.cat([p.narrow(dim, 0, size) for p, size in zip(parts, shard.sizes, strict=True)], dim)
