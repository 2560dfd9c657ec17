"""Whether boxes hold every number of a tensor once. No torch, and no hang on boxes that somebody made up.

Writers cut a tensor along one dimension, then each part along another, and so on: such boxes fall apart again at the
same planes, in about n log n steps for n boxes. What cannot be taken apart is compared pair by pair, up to a limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..regions import Region

_MOST_PAIRWISE = 64
"""Boxes that are compared pair by pair. Our writers never need it."""


def tiles(shape: tuple[int, ...], regions: Sequence[Region]) -> bool:
    """Whether the boxes lie in a tensor of `shape`, do not overlap and leave no gap."""
    inside = all(_lies_in(region, shape) for region in regions)
    full = [region for region in regions if prod(region.shape)]
    # As many numbers as the tensor has, none of them twice: then none is missing.
    return inside and sum(prod(region.shape) for region in full) == prod(shape) and _are_apart(full)


def _lies_in(region: Region, shape: tuple[int, ...]) -> bool:
    return len(region.offset) == len(region.shape) == len(shape) and all(
        begin >= 0 and side >= 0 and begin + side <= whole
        for begin, side, whole in zip(region.offset, region.shape, shape, strict=True)
    )


def _are_apart(regions: list[Region]) -> bool:
    """Whether no two boxes, none of them empty, share a number."""
    todo = [regions]
    while todo:
        group = todo.pop()
        if len(group) < 2:
            continue
        parts = next((parts for dim in range(len(group[0].shape)) if len(parts := _layers(group, dim)) > 1), None)
        if parts is not None:
            todo += parts
        elif len(group) > _MOST_PAIRWISE or any(a.meet(b) for i, a in enumerate(group) for b in group[:i]):
            return False
        elif not group[0].shape:
            return False  # scalars, each of which is all of the tensor
    return True


def _layers(regions: list[Region], dim: int) -> list[list[Region]]:
    """The boxes in groups between which a plane across `dim` passes without cutting any of them."""
    ordered = sorted(regions, key=lambda region: region.offset[dim])
    layers: list[list[Region]] = []
    end = -1
    for region in ordered:
        begin = region.offset[dim]
        if begin >= end:
            layers.append([])
        layers[-1].append(region)
        end = max(end, begin + region.shape[dim])
    return layers
