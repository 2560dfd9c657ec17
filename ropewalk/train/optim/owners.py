"""Functions of whole matrices that ranks hold in parts: each matrix is put together on one rank, its owner.

The parts go to the owner by an all-to-all and what became of them comes back by another. Compared with gathering every
matrix on every rank, no rank repeats the work of others, and each sends twice its parts instead of as many times as
there are other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.parallel.comm import Group
from ropewalk.parallel.placement import Shard

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix on its way to its owner: what is put together so far, and what it is still cut by."""

    part: Tensor
    shards: tuple[Shard, ...]
    shape: Shape
    """Of the whole."""
    function: Callable[[Tensor], Tensor]
    """Of whole matrices, N A B to N A B, each by itself; equal functions are called with many at a time."""

    def part_of(self, rank: int) -> Shape:
        """The shape of the part that a rank of the last slicing's group holds."""
        sides = list(self.part.shape)
        sides[self.shards[-1].dim] = self.shards[-1].sizes[rank]
        return tuple(sides)


def map_parts(matrices: Sequence[Matrix]) -> list[Tensor]:
    """This rank's part of what every matrix's function makes of it.

    All ranks that share one of the matrices must call with all they share, in the same order. A matrix that is cut
    twice is put together twice: first over the group of its last cut, whose ranks share the work, then by each owner
    over the group of the first.
    """
    deepest = max(matrices, key=lambda matrix: len(matrix.shards), default=None)
    if deepest is None or not deepest.shards:
        return _map_whole(matrices)
    group, dtype = deepest.shards[-1].group, deepest.part.dtype
    here = [i for i, m in enumerate(matrices) if _travels(m, group, dtype)]
    others = [i for i, m in enumerate(matrices) if not _travels(m, group, dtype)]
    owners = _deal([math.prod(matrices[i].shape) for i in here], group.size)
    owned = [
        [matrices[i] for i, owner in zip(here, owners, strict=True) if owner == rank] for rank in range(group.size)
    ]
    joined = _collect(owned, group)
    done = map_parts([*joined, *(matrices[i] for i in others)])
    back = [iter(parts) for parts in _hand_out(done[: len(joined)], owned, group)]
    parts = {i: next(back[owner]) for i, owner in zip(here, owners, strict=True)}
    parts |= dict(zip(others, done[len(joined) :], strict=True))
    return [parts[i] for i in range(len(matrices))]


def _travels(matrix: Matrix, group: Group, dtype: torch.dtype) -> bool:
    return bool(matrix.shards) and matrix.shards[-1].group is group and matrix.part.dtype == dtype


def _map_whole(matrices: Sequence[Matrix]) -> list[Tensor]:
    """Matrices of one shape and function go through it together."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.part.dtype, matrix.function), []).append(i)
    mapped: dict[int, Tensor] = {}
    for places in alike.values():
        stack = torch.stack([matrices[i].part for i in places])
        mapped |= dict(zip(places, matrices[places[0]].function(stack).unbind(0), strict=True))
    return [mapped[i] for i in range(len(matrices))]


def _deal(loads: Sequence[int], ranks: int) -> list[int]:
    """The owner of each matrix: always the rank with the least to do, so that equal ones take turns."""
    busy = [0] * ranks
    owners = []
    for load in loads:
        owner = busy.index(min(busy))
        busy[owner] += load
        owners.append(owner)
    return owners


def _collect(owned: Sequence[Sequence[Matrix]], group: Group) -> list[Matrix]:
    """The matrices that this rank owns, put together over the group; `owned` holds the parts at hand by owner."""
    sent = [[matrix.part for matrix in matrices] for matrices in owned]
    mine = owned[group.rank]
    shapes = [[matrix.part_of(rank) for matrix in mine] for rank in range(group.size)]
    received = _exchange(sent, shapes, _rows(owned, group), group)
    return [
        Matrix(torch.cat(parts, m.shards[-1].dim), m.shards[:-1], m.shape, m.function)
        for m, parts in zip(mine, zip(*received, strict=True), strict=True)
    ]


def _hand_out(done: Sequence[Tensor], owned: Sequence[Sequence[Matrix]], group: Group) -> list[list[Tensor]]:
    """The inverse of `_collect`: the parts of what its matrices became, by owner."""
    placement = [
        whole.split(m.shards[-1].sizes, m.shards[-1].dim) for whole, m in zip(done, owned[group.rank], strict=True)
    ]
    sent = [[parts[rank] for parts in placement] for rank in range(group.size)]
    shapes = [[tuple(matrix.part.shape) for matrix in matrices] for matrices in owned]
    return _exchange(sent, shapes, _rows(owned, group), group)


def _rows(owned: Sequence[Sequence[Matrix]], group: Group) -> Tensor:
    """A row for each rank, as long as the most that any rank and any owner have to tell each other."""
    ranks = range(group.size)
    side = max(sum(math.prod(matrix.part_of(rank)) for matrix in matrices) for matrices in owned for rank in ranks)
    example = next(matrix.part for matrices in owned for matrix in matrices)
    return example.new_zeros(group.size, side)


def _exchange(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], rows: Tensor, group: Group
) -> list[list[Tensor]]:
    """`sent[i]` goes to rank i; what came from rank i has `shapes[i]`. Everything travels in one all-to-all."""
    for row, parts in zip(rows, sent, strict=True):
        if parts:
            flat = torch.cat([part.reshape(-1) for part in parts])
            row[: flat.numel()] = flat
    received = []
    for row, several in zip(group.all_to_all(rows), shapes, strict=True):
        sizes = [math.prod(shape) for shape in several]
        pieces = row[: sum(sizes)].split(sizes)
        received.append([piece.view(shape) for piece, shape in zip(pieces, several, strict=True)])
    return received
