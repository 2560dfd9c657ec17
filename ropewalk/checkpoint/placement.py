"""Which machines hold copies of which shard, and what that is worth when machines are lost. Pure, no torch.

Machine i keeps its own shard and sends it to others, `copies` in all. Two ways (Gemini, Wang et al. 2023):

- *groups*: machines in groups of `copies`, each holding the shards of its group. When `copies` does not divide the
  number of machines, the last group takes the rest in and becomes a ring. A shard is lost only when a whole group is.
- *ring*: machine i sends to i+1, i+2, ...; a shard is lost when `copies` neighbours are. There are more such sets than
  groups, so groups survive more; a ring spreads what must be fetched over more machines.

A group is a ring of its own length, so one count serves both: subsets of a ring without `copies` neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

Kind = Literal["groups", "ring"]

Holders = tuple[tuple[int, ...], ...]
"""For each machine, the machines that hold its shard; itself first."""


def place(machines: int, *, copies: int, kind: Kind = "groups", racks: Sequence[Hashable] = ()) -> Holders:
    """Where the shards go. With `racks`, one a machine, copies lie in different racks as far as that can be."""
    assert 1 <= copies <= machines, f"{copies} copies on {machines} machines"
    order = _spread(racks, groups=machines // copies) if racks else list(range(machines))
    holders: list[tuple[int, ...]] = [()] * machines
    start = 0
    for size in rings(machines, copies=copies, kind=kind):
        ring = order[start : start + size]
        for place, machine in enumerate(ring):
            holders[machine] = tuple(ring[(place + i) % size] for i in range(copies))
        start += size
    return tuple(holders)


def rings(machines: int, *, copies: int, kind: Kind) -> tuple[int, ...]:
    """Lengths of the rings that make up a placement."""
    if kind == "ring":
        return (machines,)
    groups = machines // copies
    return (*[copies] * (groups - 1), machines - copies * (groups - 1))


def survives(holders: Holders, lost: Collection[int]) -> bool:
    """Whether every shard has a copy on a machine that is not `lost`."""
    gone = set(lost)
    return all(not gone.issuperset(held) for held in holders)


def survival(machines: int, *, copies: int, kind: Kind, lost: int) -> float:
    """Probability that every shard has a copy left when `lost` machines, any of them alike, are gone. Exact."""
    ways = [1]
    for size in rings(machines, copies=copies, kind=kind):
        ways = _product(ways, [_harmless(size, copies, k) for k in range(size + 1)])
    return ways[lost] / math.comb(machines, lost)


def domain_survival(holders: Holders, domains: Sequence[Hashable], *, lost: int) -> float:
    """As `survival` when `lost` whole failure domains (racks) are gone; tries every set of them."""
    known = sorted(set(domains), key=str)
    outcomes = [
        survives(holders, [machine for machine, domain in enumerate(domains) if domain in gone])
        for gone in combinations(known, lost)
    ]
    return sum(outcomes) / len(outcomes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What going back to a copy at one tier costs."""

    read_s: float
    """Seconds to fetch and check it."""
    write_s: float
    """Seconds from a step until its copy is there."""
    interval_s: float
    """Seconds between copies."""

    @property
    def wasted_s(self) -> float:
        """Mean time that a failure throws back (equation 1 of Gemini): half an interval is trained again."""
        return self.write_s + self.interval_s / 2 + self.read_s


def expected_waste(
    *,
    lost: Sequence[float],
    machines: int,
    copies: int,
    kind: Kind,
    own: Level,
    peers: Level,
    stored: Level,
) -> float:
    """Mean seconds that a failure throws back, when it takes k machines with probability `lost[k]`.

    With no machine lost (a process died), its own memory serves; with some, peers' memory as long as every shard has a
    copy there; else what is stored.
    """
    assert math.isclose(sum(lost), 1.0), f"{lost} are not probabilities of all cases"
    total = lost[0] * own.wasted_s
    for k, share in enumerate(lost[1:], 1):
        kept = survival(machines, copies=copies, kind=kind, lost=k)
        total += share * (kept * peers.wasted_s + (1 - kept) * stored.wasted_s)
    return total


def _spread(racks: Sequence[Hashable], *, groups: int) -> list[int]:
    """Machines in an order in which those of one rack lie far apart.

    Sorted by rack and dealt to the groups in turn, machines of one rack come to different groups as long as it has no
    more machines than there are groups: no order does better.
    """
    sizes = {rack: sum(other == rack for other in racks) for rack in racks}
    ordered = sorted(range(len(racks)), key=lambda machine: (-sizes[racks[machine]], str(racks[machine]), machine))
    return [machine for group in range(groups) for machine in ordered[group::groups]]


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
