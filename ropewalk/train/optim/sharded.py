"""Answers a rule's requests about sharded parameters: means, maxima, norms, and functions of whole matrices.

Rules are written for whole tensors. Where a value depends on the whole tensor, the rule yields a request and is sent
the answer. Rules of many parameters run concurrently, so their requests share messages: per group, one all-reduce for
means and norms, and one for maxima. For unsharded parameters the answer is computed locally, with the same operation.

A function of whole matrices (`Mapped`) runs on one rank per matrix, its owner: one all-to-all collects the shards,
another returns the results. Unlike all-gathering every matrix, no work is repeated, and each rank sends its shards
twice instead of once per other rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ropewalk.parallel.comm import Group
from ropewalk.parallel.placement import Placement, Shard

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of the whole tensor along `dims`, kept with size 1."""

    part: Tensor
    dims: tuple[int, ...]
    """Dimensions of `part`; its dimension 0 counts parameters and is never sharded."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The maximum of a non-negative whole tensor along `dims`, kept with size 1."""

    part: Tensor
    dims: tuple[int, ...]
    """As in `Mean`."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The Frobenius norm of every whole matrix (N A B -> N 1 1)."""

    part: Tensor


@dataclass(frozen=True, slots=True)
class Mapped:
    """This rank's shard of `function` applied to each whole matrix (N A B -> N A B)."""

    part: Tensor
    function: Callable[[Tensor], Tensor]
    """Called with several matrices at once if functions are equal."""


Request = Mean | Largest | Norm | Mapped
Asking = Generator[Sequence[Request], list[Tensor], Result]
"""A generator that yields requests, is sent the answers, and returns a result."""


def run_together(computations: Sequence[tuple[Asking[Result], Placement]]) -> list[Result]:
    """Runs computations, each about N parameters of one shape and placement, and returns their results.

    All ranks that share a parameter must call with all parameters they share, in the same order.
    """
    results: dict[int, Result] = {}
    asked: dict[int, Sequence[Request]] = {}

    def proceed(number: int, answers: list[Tensor] | None) -> None:
        computation = computations[number][0]
        try:
            asked[number] = next(computation) if answers is None else computation.send(answers)
        except StopIteration as end:
            results[number] = end.value

    for number in range(len(computations)):
        proceed(number, None)
    while asked:
        requests = [(request, computations[number][1]) for number, several in asked.items() for request in several]
        answers = iter(_answers(requests))
        open_ones, asked = asked, {}
        for number, several in open_ones.items():
            proceed(number, [next(answers) for _ in several])
    return [results[number] for number in range(len(computations))]


def _answers(requests: Sequence[tuple[Request, Placement]]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    open_ones: dict[int, _Partial] = {}
    maps: dict[int, tuple[Mapped, Placement]] = {}
    for place, (request, placement) in enumerate(requests):
        if placement.is_whole:
            found[place] = _on_the_spot(request)
        elif isinstance(request, Mapped):
            maps[place] = request, placement
        else:
            open_ones[place] = _partial(request, placement)
    found |= dict(zip(open_ones, _completed(list(open_ones.values())), strict=True))
    found |= dict(zip(maps, _mapped(list(maps.values())), strict=True))
    return [found[place] for place in range(len(requests))]


def _on_the_spot(request: Request) -> Tensor:
    match request:
        case Mean(part, dims):
            return part.mean(dims, keepdim=True)
        case Largest(part, dims):
            return part.amax(dims, keepdim=True)
        case Norm(part):
            return torch.linalg.matrix_norm(part, keepdim=True)
        case Mapped(part, function):
            return function(part)


@dataclass(frozen=True, slots=True)
class _Partial:
    """A sum or maximum over this rank's shard, the groups to reduce over, and the final function."""

    value: Tensor
    groups: tuple[Group, ...]
    finish: Callable[[Tensor], Tensor]
    operation: Literal["sum", "max"] = "sum"


def _partial(request: Mean | Largest | Norm, placement: Placement) -> _Partial:
    if isinstance(request, Norm):
        square = request.part.square().sum((1, 2), keepdim=True)
        return _Partial(square, tuple(slicing.group for slicing in placement.shards), torch.sqrt)
    count = math.prod(placement.shape[dim - 1] for dim in request.dims)
    groups = tuple(slicing.group for slicing in placement.shards if slicing.dim + 1 in request.dims)
    if isinstance(request, Largest):
        # An empty shard has no maximum; 0 is neutral, because no number is negative.
        some = all(request.part.shape[dim] for dim in request.dims)
        empty = request.part.sum(request.dims, keepdim=True)
        largest = request.part.amax(request.dims, keepdim=True) if some else empty
        return _Partial(largest, groups, torch.Tensor.contiguous, "max")
    return _Partial(request.part.sum(request.dims, keepdim=True), groups, functools.partial(torch.mul, 1 / count))


def _completed(partials: Sequence[_Partial]) -> list[Tensor]:
    """Reduces all partial results, with one all-reduce per group, operation and dtype."""
    values = [each.value for each in partials]
    kinds = dict.fromkeys((each.operation, each.value.dtype) for each in partials)
    for group in dict.fromkeys(group for each in partials for group in each.groups):
        for operation, dtype in kinds:
            places = [
                i
                for i, each in enumerate(partials)
                if group in each.groups and (each.operation, each.value.dtype) == (operation, dtype)
            ]
            if places:
                flat = torch.cat([values[place].reshape(-1) for place in places])
                flat = group.all_reduce(flat, operation=operation)
                pieces = flat.split([values[place].numel() for place in places])
                for place, piece in zip(places, pieces, strict=True):
                    values[place] = piece.view_as(values[place])
    return [each.finish(value) for each, value in zip(partials, values, strict=True)]


def _mapped(requests: Sequence[tuple[Mapped, Placement]]) -> list[Tensor]:
    matrices = [
        OwnedMatrix(part, placement.shards, placement.shape, request.function)
        for request, placement in requests
        for part in request.part.unbind(0)
    ]
    parts = iter(map_parts(matrices))
    return [torch.stack([next(parts) for _ in request.part]) for request, _ in requests]


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A matrix on its way to its owner: the part gathered so far and the remaining shards."""

    part: Tensor
    shards: tuple[Shard, ...]
    shape: Shape
    """Shape of the whole matrix."""
    function: Callable[[Tensor], Tensor]
    """As in `Mapped`."""

    def part_of(self, rank: int) -> Shape:
        """The shape of the part on a rank of the last shard's group."""
        sides = list(self.part.shape)
        sides[self.shards[-1].dim] = self.shards[-1].sizes[rank]
        return tuple(sides)


def map_parts(matrices: Sequence[OwnedMatrix]) -> list[Tensor]:
    """This rank's shard of the function of each whole matrix.

    All ranks that share a matrix must call with all matrices they share, in the same order. A matrix sharded twice is
    gathered twice: over the group of its last shard, whose ranks divide the work, then by each owner over the group of
    the first.
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


def _travels(matrix: OwnedMatrix, group: Group, dtype: torch.dtype) -> bool:
    return bool(matrix.shards) and matrix.shards[-1].group is group and matrix.part.dtype == dtype


def _map_whole(matrices: Sequence[OwnedMatrix]) -> list[Tensor]:
    """Applies functions to whole matrices, batched by shape and function."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.part.dtype, matrix.function), []).append(i)
    mapped: dict[int, Tensor] = {}
    for places in alike.values():
        stack = torch.stack([matrices[i].part for i in places])
        mapped |= dict(zip(places, matrices[places[0]].function(stack).unbind(0), strict=True))
    return [mapped[i] for i in range(len(matrices))]


def _deal(loads: Sequence[int], ranks: int) -> list[int]:
    """The owner of each matrix: the least loaded rank so far, so equal matrices rotate."""
    busy = [0] * ranks
    owners = []
    for load in loads:
        owner = busy.index(min(busy))
        busy[owner] += load
        owners.append(owner)
    return owners


def _collect(owned: Sequence[Sequence[OwnedMatrix]], group: Group) -> list[OwnedMatrix]:
    """Gathers the matrices this rank owns; `owned` holds this rank's parts by owner."""
    sent = [[matrix.part for matrix in matrices] for matrices in owned]
    mine = owned[group.rank]
    shapes = [[matrix.part_of(rank) for matrix in mine] for rank in range(group.size)]
    received = _exchange(sent, shapes, _rows(owned, group), group)
    return [
        OwnedMatrix(torch.cat(parts, m.shards[-1].dim), m.shards[:-1], m.shape, m.function)
        for m, parts in zip(mine, zip(*received, strict=True), strict=True)
    ]


def _hand_out(done: Sequence[Tensor], owned: Sequence[Sequence[OwnedMatrix]], group: Group) -> list[list[Tensor]]:
    """The inverse of `_collect`: returns the parts of the results, by owner."""
    placement = [
        whole.split(m.shards[-1].sizes, m.shards[-1].dim) for whole, m in zip(done, owned[group.rank], strict=True)
    ]
    sent = [[parts[rank] for parts in placement] for rank in range(group.size)]
    shapes = [[tuple(matrix.part.shape) for matrix in matrices] for matrices in owned]
    return _exchange(sent, shapes, _rows(owned, group), group)


def _rows(owned: Sequence[Sequence[OwnedMatrix]], group: Group) -> Tensor:
    """A send buffer with one row per rank, as long as the longest message."""
    ranks = range(group.size)
    side = max(sum(math.prod(matrix.part_of(rank)) for matrix in matrices) for matrices in owned for rank in ranks)
    example = next(matrix.part for matrices in owned for matrix in matrices)
    return example.new_zeros(group.size, side)


def _exchange(
    sent: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], rows: Tensor, group: Group
) -> list[list[Tensor]]:
    """Sends `sent[i]` to rank i and receives `shapes[i]` from it, in one all-to-all."""
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
