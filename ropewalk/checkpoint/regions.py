"""Regions of tensors: intersection, byte ranges, copying, and exact cover. No torch.

A region is an offset and a shape. A scalar is a region without dimensions and has one element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Region:
    """An axis-aligned part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def slices(self, other: Region) -> tuple[slice, ...]:
        """The slices of `self` in an array that holds `other`, which contains it."""
        return tuple(
            slice(begin - base, begin - base + side)
            for begin, base, side in zip(self.offset, other.offset, self.shape, strict=True)
        )

    def intersect(self, other: Region) -> Region | None:
        """The intersection; None if it is empty."""
        offset, shape = [], []
        for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            begin, end = max(a, b), min(a + m, b + n)
            if begin >= end:
                return None
            offset.append(begin)
            shape.append(end - begin)
        return Region(tuple(offset), tuple(shape))


def whole_region(shape: tuple[int, ...]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), shape)


def element_range(part: Region, piece: Region) -> tuple[int, int]:
    """First and last element (exclusive) of `piece`, in row-major order, to read for its sub-region `part`: one range
    of
    whole rows of the first dimension."""
    if not piece.shape:
        return 0, 1
    row = math.prod(piece.shape[1:])
    first = part.offset[0] - piece.offset[0]
    return first * row, (first + part.shape[0]) * row


def copy_region(
    target: npt.NDArray[np.uint8], wanted: Region, part: Region, piece: Region, data: memoryview, item: int
) -> None:
    """Copies `part` into `target`, the bytes of region `wanted`, from `data`: the `element_range` of `piece`.

    Elements are copied as `item` bytes, because numpy lacks some of the types.
    """
    import numpy as np  # takes 0.1 s, not needed to list checkpoints

    have = Region((part.offset[0], *piece.offset[1:]), (part.shape[0], *piece.shape[1:])) if piece.shape else piece
    source = np.frombuffer(data, np.uint8).reshape(*have.shape, item)
    target.reshape(*wanted.shape, item)[part.slices(wanted)] = source[part.slices(have)]


_MAX_PAIRWISE = 64
"""Maximum number of regions compared pairwise. Our writers never need it."""


def tiles(shape: tuple[int, ...], regions: Sequence[Region]) -> bool:
    """Whether the regions cover a tensor of `shape` exactly: inside it, without overlap or gap.

    Writers split tensors along one dimension, then each shard along another, and so on. Such regions separate again
    along the same planes, in about n log n steps. Others are compared pairwise, up to a limit, so that no manifest can
    make this slow.
    """
    inside = all(_lies_in(region, shape) for region in regions)
    full = [region for region in regions if math.prod(region.shape)]
    # As many elements as the tensor, none twice: none is missing.
    return inside and sum(math.prod(region.shape) for region in full) == math.prod(shape) and _are_apart(full)


def _lies_in(region: Region, shape: tuple[int, ...]) -> bool:
    return len(region.offset) == len(region.shape) == len(shape) and all(
        begin >= 0 and side >= 0 and begin + side <= whole
        for begin, side, whole in zip(region.offset, region.shape, shape, strict=True)
    )


def _are_apart(regions: list[Region]) -> bool:
    """Whether no two of these regions, none of them empty, overlap."""
    todo = [regions]
    while todo:
        group = todo.pop()
        if len(group) < 2:
            continue
        parts = next((parts for dim in range(len(group[0].shape)) if len(parts := _layers(group, dim)) > 1), None)
        if parts is not None:
            todo += parts
        elif len(group) > _MAX_PAIRWISE or any(a.intersect(b) for i, a in enumerate(group) for b in group[:i]):
            return False
        elif not group[0].shape:
            return False  # scalars: each is the whole tensor
    return True


def _layers(regions: list[Region], dim: int) -> list[list[Region]]:
    """The regions, grouped so that planes across `dim` separate the groups without cutting a region."""
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
