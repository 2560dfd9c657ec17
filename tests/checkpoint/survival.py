"""What a placement of copies is worth when machines are lost, in closed form.

A group is a ring of its own length, so one count serves both: subsets of a ring without `copies` neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ropewalk.checkpoint.tiers.peer_tier import Holders, PlacementKind, rings


def survives(holders: Holders, lost: Collection[int]) -> bool:
    """Whether every shard has a copy on a machine that is not `lost`."""
    gone = set(lost)
    return all(not gone.issuperset(held) for held in holders)


def survival(machines: int, *, copies: int, kind: PlacementKind, lost: int) -> float:
    """Probability that every shard has a copy left when `lost` machines, any of them alike, are gone. Exact."""
    ways = [1]
    for size in rings(machines, copies=copies, kind=kind):
        ways = _product(ways, [_harmless(size, copies, k) for k in range(size + 1)])
    return ways[lost] / math.comb(machines, lost)


def _harmless(size: int, copies: int, lost: int) -> int:
    """Subsets of `lost` places on a ring of `size` that hold no `copies` neighbours.

    The `size - lost` places that stay cut the ring into as many runs of lost ones, each shorter than `copies`. There
    are `bounded` ways to choose the runs from a given place on; turned to every place, each subset comes up once for
    each of the places that stay.
    """
    if lost == size:
        return 0
    stay = size - lost
    bounded = sum(
        (-1) ** j * math.comb(stay, j) * math.comb(lost - j * copies + stay - 1, stay - 1)
        for j in range(lost // copies + 1)
    )
    return size * bounded // stay


def _product(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Of two polynomials."""
    total = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            total[i + j] += a * b
    return total
