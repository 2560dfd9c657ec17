"""Which machines hold copies of which shard. Pure, no torch.

Machine i keeps its own shard and sends it to others, `copies` in all. Two ways (Gemini, Wang et al. 2023):

- *groups*: machines in groups of `copies`, each holding the shards of its group. When `copies` does not divide the
  number of machines, the last group takes the rest in and becomes a ring. A shard is lost only when a whole group is.
- *ring*: machine i sends to i+1, i+2, ...; a shard is lost when `copies` neighbours are. There are more such sets than
  groups, so groups survive more; a ring spreads what must be fetched over more machines.

A group is a ring of its own length.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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


def _spread(racks: Sequence[Hashable], *, groups: int) -> list[int]:
    """Machines in an order in which those of one rack lie far apart.

    Sorted by rack and dealt to the groups in turn, machines of one rack come to different groups as long as it has no
    more machines than there are groups: no order does better.
    """
    sizes = {rack: sum(other == rack for other in racks) for rack in racks}
    ordered = sorted(range(len(racks)), key=lambda machine: (-sizes[racks[machine]], str(racks[machine]), machine))
    return [machine for group in range(groups) for machine in ordered[group::groups]]
