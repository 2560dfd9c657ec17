"""What a rule may ask of the whole of a parameter of which this rank holds a part, and how ranks answer together.

A rule is written for whole tensors. Where a number or a matrix depends on all of one, the rule yields a request and is
sent the answer. Rules of many parameters run side by side, so that what they ask at the same moment travels together:
one all-reduce a group for all their means and norms, and one for all that is largest. For a parameter that is not cut
the answer is computed on the spot, by the operation that a rule for one device would use.
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
from ropewalk.parallel.placement import Placement

from .owners import Matrix, map_parts

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean along `dims` of the whole, which stay with size 1."""

    part: Tensor
    dims: tuple[int, ...]
    """Of `part`, whose dimension 0 counts parameters and is never cut."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest along `dims` of the whole, which stay with size 1; no number is below 0."""

    part: Tensor
    dims: tuple[int, ...]
    """As in `Mean`."""


@dataclass(frozen=True, slots=True)
class Norm:
    """The length of every whole matrix of N A B, as N 1 1."""

    part: Tensor


@dataclass(frozen=True, slots=True)
class Mapped:
    """This rank's part of what `function` makes of whole matrices, N A B to N A B, each by itself."""

    part: Tensor
    function: Callable[[Tensor], Tensor]
    """Equal functions are called with many matrices at a time."""


Request = Mean | Largest | Norm | Mapped
Asking = Generator[Sequence[Request], list[Tensor], Result]
"""A computation that yields requests, is sent their answers, and ends with a result."""


def run_together(computations: Sequence[tuple[Asking[Result], Placement]]) -> list[Result]:
    """The results of computations about parameters that are cut as said, N of them alike in each.

    All ranks that share one of the parameters must call with all they share, in the same order.
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
    """A sum or a maximum over this rank's part, over whom it is to be completed, and what becomes of it then."""

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
        # A part without columns has no largest; 0 is no larger than that of any other.
        some = all(request.part.shape[dim] for dim in request.dims)
        empty = request.part.sum(request.dims, keepdim=True)
        largest = request.part.amax(request.dims, keepdim=True) if some else empty
        return _Partial(largest, groups, torch.Tensor.contiguous, "max")
    return _Partial(request.part.sum(request.dims, keepdim=True), groups, functools.partial(torch.mul, 1 / count))


def _completed(partials: Sequence[_Partial]) -> list[Tensor]:
    """All of them finished, by one all-reduce for each group, operation and type of number."""
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
        Matrix(part, placement.shards, placement.shape, request.function)
        for request, placement in requests
        for part in request.part.unbind(0)
    ]
    parts = iter(map_parts(matrices))
    return [torch.stack([next(parts) for _ in request.part]) for request, _ in requests]
