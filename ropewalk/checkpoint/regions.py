"""Boxes of tensors: which numbers of a wanted box lie in which stored piece. numpy alone.

A box is a corner and sides. A tensor of no dimensions is a box with no sides, which holds one number.
"""

from __future__ import annotations

import math
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


def whole(shape: tuple[int, ...]) -> Region:
    """The box of a whole tensor."""
    return Region((0,) * len(shape), shape)


def rows_of(part: Region, piece: Region) -> tuple[int, int]:
    """First and last number (exclusive) that must be read, of `piece` in row-major order, to have `part` of it.

    Only whole steps of the first side are left out: what is read is one range.
    """
    if not piece.shape:
        return 0, 1
    row = math.prod(piece.shape[1:])
    first = part.offset[0] - piece.offset[0]
    return first * row, (first + part.shape[0]) * row


def fill(
    target: npt.NDArray[np.uint8], wanted: Region, part: Region, piece: Region, data: memoryview, item: int
) -> None:
    """Copies `part` to `target`, the bytes of the box `wanted`, from `data`: the range of `piece` named by `rows_of`.

    Arrays have one more side, of `item` bytes a number: types that numpy does not know are copied as bytes.
    """
    import numpy as np  # a tenth of a second that listing checkpoints need not spend

    have = Region((part.offset[0], *piece.offset[1:]), (part.shape[0], *piece.shape[1:])) if piece.shape else piece
    source = np.frombuffer(data, np.uint8).reshape(*have.shape, item)
    target.reshape(*wanted.shape, item)[part.slices(wanted)] = source[part.slices(have)]
