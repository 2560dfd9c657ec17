"""Placements on meshes whose ranks never talk: one process saves and loads what each of them holds."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from ropewalk.parallel.placement import Placement, Shard


def placed(shape: tuple[int, ...], mesh: tuple[int, ...], dims: tuple[int | None, ...], rank: int) -> Placement:
    """What `rank` holds of a tensor of `shape`: mesh axis i splits dimension `dims[i]`; None: replicated."""
    coordinates = list(itertools.product(*map(range, mesh)))[rank]
    sides, shards, first = list(shape), [], True
    for coordinate, ranks, dim in zip(coordinates, mesh, dims, strict=True):
        if dim is None:
            first &= coordinate == 0
            continue
        # As torch splits: equal shards, rounded up; the last ranks have less or nothing.
        each = -(-sides[dim] // ranks)
        sizes = tuple(max(0, min(each, sides[dim] - each * other)) for other in range(ranks))
        group: Any = SimpleNamespace(rank=coordinate, size=ranks)
        shards.append(Shard(dim, sizes, group))
        sides[dim] = sizes[coordinate]
    return Placement(shape, tuple(shards), first)
