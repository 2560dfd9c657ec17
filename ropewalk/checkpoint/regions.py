"""Boxes of tensors: which numbers of a wanted box lie in which stored piece. numpy alone.

A box is a corner and sides. A tensor of no dimensions is a box with no sides, which holds one number.
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
    """A corner in a tensor and the sides from there."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def slices(self, other: Region) -> tuple[slice, ...]:
        """`self` as slices of an array that holds `other`, in which it lies."""
        return tuple(
            slice(begin - base, begin - base + side)
            for begin, base, side in zip(self.offset, other.offset, self.shape, strict=True)
        )

    def meet(self, other: Region) -> Region | None:
        """What both hold; None when that is nothing."""
        offset, shape = [], []
        for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            begin, end = max(a, b), min(a + m, b + n)
            if begin >= end:
                return None
            offset.append(begin)
            shape.append(end - begin)
        return Region(tuple(offset), tuple(shape))


def whole_region(shape: tuple[int, ...]) -> Region:
    """The box of a whole tensor."""
    return Region((0,) * len(shape), shape)


def element_range(part: Region, piece: Region) -> tuple[int, int]:
    """First and last number (exclusive) that must be read, of `piece` in row-major order, to have `part` of it.

    Only whole steps of the first side are left out: what is read is one range.
    """
    if not piece.shape:
        return 0, 1
    row = math.prod(piece.shape[1:])
    first = part.offset[0] - piece.offset[0]
    return first * row, (first + part.shape[0]) * row


def copy_region(
    target: npt.NDArray[np.uint8], wanted: Region, part: Region, piece: Region, data: memoryview, item: int
) -> None:
    """Copies `part` to `target`, the bytes of the box `wanted`, from `data`: the range of `piece` named by `rows_of`.

    Arrays have one more side, of `item` bytes a number: types that numpy does not know are copied as bytes.
    """
    import numpy as np  # a tenth of a second that listing checkpoints need not spend

    have = Region((part.offset[0], *piece.offset[1:]), (part.shape[0], *piece.shape[1:])) if piece.shape else piece
    source = np.frombuffer(data, np.uint8).reshape(*have.shape, item)
    target.reshape(*wanted.shape, item)[part.slices(wanted)] = source[part.slices(have)]


_MOST_PAIRWISE = 64
"""Boxes that are compared pair by pair. Our writers never need it."""


def tiles(shape: tuple[int, ...], regions: Sequence[Region]) -> bool:
    """Whether the boxes lie in a tensor of `shape`, do not overlap and leave no gap."""
    inside = all(_lies_in(region, shape) for region in regions)
    full = [region for region in regions if math.prod(region.shape)]
    # As many numbers as the tensor has, none of them twice: then none is missing.
    return inside and sum(math.prod(region.shape) for region in full) == math.prod(shape) and _are_apart(full)


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
